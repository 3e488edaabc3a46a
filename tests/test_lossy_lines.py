"""Lines of `bench/faults/networks.py`: what they lose and forget is what TCP notices, and what they count is true."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READY = os.name == "posix" and os.geteuid() == 0 and os.access("/dev/net/tun", os.R_OK | os.W_OK)
BYTES = 200_000

SCRIPT = """
import json, socket, subprocess, sys, threading, time
from bench.faults.lossy_lines import SERVER, Line, Lines

SENDS = "import socket; c = socket.create_connection(('{server}', 5000)); c.sendall(b'x' * {size}); " \\
    "c.shutdown(1); print(c.recv(100).decode())"
KEEPS = '''
import socket, sys
c = socket.create_connection(('{server}', 5000))
c.settimeout(2)
for wait in sys.stdin:
    c.sendall(b'ping')
    try:
        print(c.recv(4).decode(), flush=True)
    except TimeoutError:
        print('silence', flush=True)
'''

def serve(listener):
    while True:
        line, _ = listener.accept()
        threading.Thread(target=answer, args=(line,), daemon=True).start()

def answer(line):
    count = 0
    while data := line.recv(65536):
        count += len(data)
        if data == b'ping':
            line.sendall(b'pong')
    line.sendall(str(count).encode())

lines = Lines(['a'], seed=1)
threading.Thread(target=serve, args=(socket.create_server((SERVER, 5000)),), daemon=True).start()
told = {{}}

def sends(name, line):
    count, begin_s = lines.set('a', line), time.monotonic()
    command = [*lines.entering('a'), sys.executable, '-c', SENDS.format(server=SERVER, size={size})]
    came = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    told[name] = [came, count.payload, count.again, count.lost, time.monotonic() - begin_s]

def keeps(name, line, then):
    lines.set('a', line)
    command = [*lines.entering('a'), sys.executable, '-c', KEEPS.format(server=SERVER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        heard = []
        for step in (lambda: None, then):
            step()
            process.stdin.write('now\\n')
            process.stdin.flush()
            heard.append(process.stdout.readline().strip())
        process.stdin.close()
        process.kill()
    told[name] = heard

sends('clean', Line())
sends('lossy', Line(delay_s=0.01, loss=0.05))
sends('slow', Line(mbps=4))
keeps('stays', Line(), lambda: None)
keeps('is forgotten', Line(idle_s=0.5), lambda: time.sleep(1))
keeps('moves', Line(), lambda: lines.move('a'))
sends('moved', Line())
lines.close()
print(json.dumps(told))
"""


@pytest.mark.skipif(not READY, reason="network namespaces and TUN devices take root")
def test_lines_lose_delay_forget_and_count() -> None:
    script = SCRIPT.replace("{size}", str(BYTES)).replace("{{}}", "{}")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    if "takes root on Linux" in done.stderr:
        pytest.skip("no network namespaces here")
    told = json.loads(done.stdout.splitlines()[-1])
    for name in ("clean", "lossy", "slow", "moved"):
        came, payload, again, _, _ = told[name]
        assert came == str(BYTES), f"TCP makes up for it: {name}"
        assert payload - again == BYTES + len(str(BYTES)), "each byte counts once, but for those sent again"
    _, _, again, lost, _ = told["lossy"]
    assert lost > 0 and again > 0
    assert told["slow"][4] >= 8 * BYTES / 4e6, "4 megabits a second"
    assert told["stays"] == ["pong", "pong"]
    assert told["is forgotten"] == ["pong", "silence"] == told["moves"]
