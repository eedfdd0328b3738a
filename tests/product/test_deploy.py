"""Dockerfile, compose.yaml and Prometheus' settings name what exists."""

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from kvfold.cli.main import app

ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("name", [name for name, x in SERVICES.items() if "command" in x])
def test_commands_are_kvfolds(name: str) -> None:
    words = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in SERVICES[name]["command"]]
    app.parse_args(words, exit_on_error=False, print_error=False)
    assert "0.0.0.0" in words and "8000" in words


def test_no_port_is_open_to_others() -> None:
    ports = [port for x in SERVICES.values() for port in x.get("ports", ())]
    assert len(ports) == 2 and all(port.startswith("127.0.0.1:") for port in ports)


def test_the_router_and_prometheus_ask_services() -> None:
    urls = [x for x in SERVICES["router"]["command"] if x.startswith("http")]
    assert urls == [f"http://{x}:8000" for x in SERVICES if x.startswith("replica")]
    found = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [x for job in found for one in job["static_configs"] for x in one["targets"]]
    assert {x.partition(":")[0] for x in targets} == SERVICES.keys() - {"prometheus"}


def test_prometheus_has_the_rules_that_it_names() -> None:
    settings = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    mounts = [x.split(":")[:2] for x in SERVICES["prometheus"]["volumes"] if x.startswith("./")]
    mounted = {Path(target): ROOT / source for source, target in mounts}
    for name in settings["rule_files"]:
        rules = mounted[Path("/etc/prometheus") / name]
        assert yaml.safe_load(rules.read_text())["groups"]


def test_the_image_has_what_its_command_needs() -> None:
    text = (ROOT / "Dockerfile").read_text()
    extras = re.search(r'"\.\[(.*)\]"', text)[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"server"} <= set(extras) <= project["optional-dependencies"].keys()
    ignored = (ROOT / ".dockerignore").read_text()
    for path in re.findall(r"^COPY (.*) \S+$", text, re.M):
        for part in path.split():
            assert (ROOT / part).exists() and f"!{part}" in ignored, part
    assert "USER kvfold" in text and os.access(ROOT / "deploy" / "prometheus.yml", os.R_OK)
