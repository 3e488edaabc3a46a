// Shows the run, and hands what the operator wants to the server. All that comes from the run is set as text.
"use strict";

const EVERY_MS = 1000, MOST_WAIT_MS = 10000;
const SVG = "http://www.w3.org/2000/svg";
const at = id => document.getElementById(id);
// Why a silo had no order: lines and dots beside colours, for who cannot tell these apart, and for print.
const HATCHES = { paused: "M1 0V6M4 0V6", dropped: "M-1 1L1 -1M0 6L6 0M5 7L7 5", away: "M2 3H4", gone: "" };
let asking = false, wait_ms = EVERY_MS;

function make(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function drawn(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function number(value, digits = 1, least = 0) {
  if (value === null || value === undefined) return "-";
  return value.toLocaleString("en", { minimumFractionDigits: least, maximumFractionDigits: digits });
}

function percent(share) {
  return share === null ? "-" : `${number(100 * share, 1, 1)} %`;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${number(count, unit ? 1 : 0)} ${units[unit]}`;
}

function span(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 120) return `${number(seconds, 1, 1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

async function call(path, body) {
  const headers = { "X-FedSync-Key": sessionStorage.getItem("key") || "" };
  const options = { headers, cache: "no-store", credentials: "same-origin" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  const answer = await fetch(path, options);
  const told = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(told.problem || "no answer"), { status: answer.status });
  return told;
}

async function enter() {
  const token = location.hash.slice(1);
  if (!token) return;
  history.replaceState(null, "", "/");
  sessionStorage.setItem("key", (await call("/enter", { token })).key);
}

function trouble(text) {
  at("trouble").hidden = !text;
  at("trouble").textContent = text;
}

async function ask(question) {
  if (asking) return;
  asking = true;
  for (const button of document.querySelectorAll("button")) button.disabled = true;
  at("answer").className = "";
  at("answer").textContent = "asking the run ...";
  try {
    at("answer").textContent = `Done: ${(await call("/ask", question)).done}`;
  } catch (error) {
    at("answer").className = "bad";
    at("answer").textContent = `Refused: ${error.message}`;
  } finally {
    asking = false;
    for (const button of document.querySelectorAll("button")) button.disabled = false;
    await look();
  }
}

function confirmed(question, words) {
  if (window.confirm(words)) ask(question);
}

function showFigures(run) {
  const limits = run.stop, unit = run.virtual ? " (virtual)" : "";
  const shown = [
    ["round", limits.rounds ? `${run.rounds} of ${limits.rounds}` : `${run.rounds}`],
    [`time${unit}`, limits.seconds ? `${span(run.now_s)} of ${span(limits.seconds)}` : span(run.now_s)],
    ["to go", span(run.left_s)],
    ["training loss", number(run.loss, 4)],
    ["accuracy", limits.target_accuracy ? `${number(run.accuracy, 4)} of ${limits.target_accuracy}` : number(run.accuracy, 4)],
    ["time spent training", percent(run.utilisation)],
    ["to the server", bytes(run.bytes_up)],
    ["to the silos", bytes(run.bytes_down)],
  ];
  at("figures").replaceChildren(...shown.map(([name, value]) => {
    const box = make("div");
    box.append(make("dt", name), make("dd", value));
    return box;
  }));
}

// Rows stay, so that the focus does, and nobody's button is taken away.
const rows = new Map();

function newRow(name) {
  const row = make("tr"), head = make("th", name), button = make("button");
  head.scope = "row";
  head.title = name;
  button.type = "button";
  button.addEventListener("click", () => row.className === "dropped"
    ? ask({ type: "ReadmitSilo", silo: name })
    : confirmed({ type: "DropSilo", silo: name }, `Go on without ${name}? What it has in work is discarded.`));
  row.append(head, ...Array.from({ length: 8 }, () => make("td")), make("td", undefined, "steer"));
  row.lastChild.append(button);
  return row;
}

function showSilos(run) {
  const names = run.silos.map(silo => silo.name);
  if (names.length !== rows.size || names.some(name => !rows.has(name))) {
    rows.clear();
    for (const name of names) rows.set(name, newRow(name));
    at("silos").replaceChildren(...rows.values());
  }
  for (const silo of run.silos) {
    const row = rows.get(silo.name), button = row.lastChild.firstChild, out = silo.state === "dropped";
    const cells = [
      [silo.state, silo.state], [number(silo.orders)], [number(silo.failures), silo.failures ? "bad" : ""],
      [silo.batch ? number(silo.batch) : "-"], [number(silo.speed)], [silo.left_s === null ? "-" : span(silo.left_s)],
      [percent(silo.waiting)], [bytes(silo.bytes_up)],
    ];
    row.className = silo.state;
    cells.forEach(([text, name], index) => {
      row.children[index + 1].textContent = text;
      row.children[index + 1].className = name || "";
    });
    button.hidden = !run.steers;
    button.disabled = asking;
    button.textContent = out ? "Readmit" : "Drop";
    button.setAttribute("aria-label", `${out ? "Readmit" : "Drop"} ${silo.name}`);
  }
  const rest = [];
  if (run.more_silos) rest.push(`and ${run.more_silos} more`);
  if (run.dropped_away.length) rest.push(`dropped and never here: ${run.dropped_away.join(", ")}`);
  at("more").textContent = rest.join("; ");
}

function ticks(begin, end) {
  const raw = (end - begin) / 5, size = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].map(n => n * size).find(n => n >= raw) || 1, found = [];
  for (let value = Math.ceil(begin / step) * step; value <= end; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

function hatches() {
  const defs = drawn("defs", {});
  for (const [why, path] of Object.entries(HATCHES)) {
    const pattern = drawn("pattern", { id: `hatch-${why}`, class: why, width: 6, height: 6, patternUnits: "userSpaceOnUse" });
    pattern.append(drawn("rect", { width: 6, height: 6 }), drawn("path", { d: path }));
    defs.append(pattern);
  }
  return defs;
}

function showTimeline(run) {
  const svg = at("timeline"), silos = run.silos.filter(silo => silo.spans.length || silo.since_s !== null);
  const width = Math.max(svg.clientWidth || 900, 352), left = width < 600 ? 96 : 130, high = 16, gap = 5;
  const begins = silos.flatMap(silo => silo.spans.map(one => one[0])).concat(silos.map(silo => silo.since_s ?? Infinity));
  const end = Math.max(run.now_s, ...silos.flatMap(silo => silo.spans.map(one => one[2])), 0.001);
  // From where all rows are known: a fast silo's oldest order that is kept may be newer than a slow one's.
  const known = silos.map(silo => silo.spans.length >= 24 ? silo.spans[0][0] : 0);
  const begin = Math.min(Math.max(Math.min(...begins, end), ...known), end - 0.001);
  const x = seconds => left + (width - left - 12) * (Math.max(seconds, begin) - begin) / (end - begin);
  const height = silos.length * (high + gap) + 26, parts = [hatches()];
  silos.forEach((silo, index) => {
    const y = index * (high + gap) + 2, most = left < 130 ? 13 : 17;
    const label = silo.name.length > most ? `${silo.name.slice(0, most - 1)}…` : silo.name;
    parts.push(drawn("text", { x: left - 8, y: y + 12, "text-anchor": "end" }, label));
    parts.push(drawn("rect", { class: "rest", x: left, y, width: width - left - 12, height: high }));
    const box = (name, from, to, more = {}) => {
      const place = { x: x(from), y, width: Math.max(x(to) - x(from), 1), height: high };
      if (to > begin) parts.push(drawn("rect", { class: name, ...place, ...more }));
    };
    for (const [from, to, why] of silo.absences) box("absence", from, to, { fill: `url(#hatch-${why})` });
    for (const [from, compute, to] of silo.spans) {
      if (compute === null) { box("none", from, to); continue; }
      box("overhead", Math.min(from + compute, to), to);
      box("compute", from, Math.min(from + compute, to));
    }
    if (silo.since_s !== null) box("work", silo.since_s, run.now_s);
  });
  const foot = height - 22;
  for (const at_s of run.commits) {
    if (at_s >= begin) parts.push(drawn("line", { class: "commit", x1: x(at_s), x2: x(at_s), y1: 0, y2: foot }));
  }
  for (const value of ticks(begin, end)) {
    parts.push(drawn("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, `${number(value, 2)} s`));
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", `Orders of ${silos.length} silos from ${number(begin)} s to ${number(end)} s`);
  svg.replaceChildren(...parts);
}

function showCurve(id, points, place) {
  const svg = at(id), found = points.filter(one => one[place] !== null).map(one => [one[0], one[place]]);
  const width = Math.max(svg.clientWidth || 480, 260), height = 180, left = 52, foot = 22;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  if (!found.length) {
    svg.setAttribute("aria-label", "nothing is known yet");
    svg.replaceChildren(drawn("text", { x: left, y: height / 2 }, "nothing is known yet"));
    return;
  }
  const values = found.map(one => one[1]), last = found[found.length - 1];
  let low = Math.min(...values), top = Math.max(...values);
  const room = (top - low) * 0.08 || Math.abs(top) * 0.1 || 1;
  low -= room; top += room;
  const end = Math.max(last[0], 0.001);
  const x = seconds => left + (width - left - 14) * seconds / end, y = value => 6 + (height - foot - 12) * (top - value) / (top - low);
  const parts = [];
  for (const value of ticks(low, top)) {
    parts.push(drawn("line", { class: "axis", x1: left, x2: width - 14, y1: y(value), y2: y(value) }));
    parts.push(drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, 4)));
  }
  for (const value of ticks(0, end)) {
    parts.push(drawn("text", { x: x(value), y: height - 6, "text-anchor": value ? "middle" : "start" }, `${number(value, 2)} s`));
  }
  parts.push(drawn("polyline", { class: "curve", points: found.map(([s, v]) => `${x(s).toFixed(1)},${y(v).toFixed(1)}`).join(" ") }));
  parts.push(drawn("circle", { class: "dot", cx: x(last[0]), cy: y(last[1]), r: 3.5 }));
  svg.setAttribute("aria-label", `${found.length} rounds, the last ${number(last[1], 4)}`);
  svg.replaceChildren(...parts);
}

function item(at_s, text, below, name) {
  const made = make("li");
  made.append(make("span", span(at_s), "at"), make("span", text, name));
  if (below) made.append(make("span", below, "did"));
  return made;
}

function show(run) {
  const word = at("word");
  at("title").textContent = run.title || "FedSync run";
  document.title = `${run.state || "waiting"}: ${run.title || "FedSync"}`;
  word.textContent = run.state || "waiting";
  word.className = run.state || "";
  if (!run.entries) { at("why").textContent = run.why || "nothing has happened yet"; return; }
  at("why").textContent = run.why || (run.quiet_s >= 10 && run.state === "running" ? `nothing new for ${span(run.quiet_s)}` : "");
  at("steering").hidden = !run.steers;
  at("pause").textContent = run.state === "paused" ? "Continue" : "Pause";
  for (const input of at("stop").elements) {
    if (input.name) input.placeholder = run.stop[input.name] === undefined ? "none" : `${run.stop[input.name]}`;
  }
  at("lost").hidden = !run.lost.length;
  at("lost").replaceChildren(...run.lost.map(words => make("li", words)));
  showFigures(run);
  showSilos(run);
  showTimeline(run);
  showCurve("loss", run.points, 1);
  showCurve("accuracy", run.points, 2);
  at("decisions").replaceChildren(...run.decisions.map(one => item(one.at_s, one.reason, one.did)).reverse());
  at("asked").hidden = !run.operator.length;
  at("operator").replaceChildren(...run.operator.map(([at_s, text, refused]) =>
    item(at_s, refused ? `refused: ${text}` : text, refused, refused ? "bad" : "")).reverse());
}

async function look() {
  try {
    const run = await call("/run");
    trouble(run.problem || "");
    if (!run.problem) show(run);
    wait_ms = EVERY_MS;
  } catch (error) {
    trouble(error.status ? error.message : "The page's server does not answer; start `fedsync page` again.");
    wait_ms = error.status === 401 ? Infinity : Math.min(2 * wait_ms, MOST_WAIT_MS);
  }
}

async function follow() {
  if (!document.hidden && !asking) await look();
  if (wait_ms !== Infinity) setTimeout(follow, wait_ms);
}

at("pause").addEventListener("click", () => ask({ type: at("word").className === "paused" ? "ContinueRun" : "PauseRun" }));
at("stop").addEventListener("submit", event => {
  event.preventDefault();
  const question = { type: "ChangeStop" }, words = [];
  for (const input of at("stop").elements) {
    if (!input.name || input.value === "") continue;
    question[input.name] = Number(input.value);
    words.push(`${input.name.replace("_", " ")} ${input.value}`);
  }
  if (!words.length) { at("answer").textContent = "Write what is to change."; return; }
  confirmed(question, `End the run at ${words.join(", ")}? A rule that is reached already ends it now.`);
});

enter().then(follow, error => { trouble(error.message); });
