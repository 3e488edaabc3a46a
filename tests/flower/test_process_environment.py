"""Calls on one machine go through no proxy, whatever the environment of whoever starts Flower says."""

from pathlib import Path

import pytest

from fedsync.flower.process_environment import flower_environment, flower_in_this_process
from tests.proxy import as_httpx_goes

URLS = ["http://127.0.0.1:9092", "https://127.0.0.1:9092", "https://localhost:9092", "https://[::1]:9092"]
PROXY = "http://proxy.example.org:3128"


@pytest.fixture(autouse=True)
def behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, PROXY)
    for name in ("NO_PROXY", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.parametrize("url", URLS)
def test_flowers_processes(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_httpx_goes({}, url, monkeypatch) == "proxy.example.org:3128", "this is what is to be kept from them"
    assert as_httpx_goes(flower_environment(tmp_path), url, monkeypatch) is None
    assert as_httpx_goes(flower_environment(tmp_path), "https://wandb.example.org", monkeypatch) is not None
    with flower_in_this_process(tmp_path):
        assert as_httpx_goes({}, url, monkeypatch) is None
