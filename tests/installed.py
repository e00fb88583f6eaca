"""What an installation of the wheel can do: run by the environment that it lies in, with the extras that are there.

    python tests/installed.py torch sign

Without arguments: none. An extra that is there has to work; one that is not has to fail in one line that says what to
install. Nothing is imported from the repository, of which only the quickstart's program is read.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

QUICKSTART = Path(__file__).resolve().parents[1] / "docs" / "quickstart.md"

# Histories of NumPy arrays by either codec, the verbs, and every public name but those that need torch.
PLAIN = """
import numpy as np, pulse_rl as pulse
for name in pulse.__all__:
    try: getattr(pulse, name)
    except pulse.MissingExtraError as error: assert error.extra == "torch", error
for codec in ("gap", "context"):
    weights, live = ({"w": np.arange(60_000, dtype=np.uint16) * k} for k in (1, 0))
    old = {"w": weights["w"].copy()}
    publisher, subscriber = pulse.Publisher(codec, codec=codec), pulse.Subscriber(codec)
    for version in range(3):
        publisher.publish(weights, version=version)
        assert subscriber.sync(live).version == version and (live["w"] == weights["w"]).all()
        weights["w"][::97] += 1
    publisher.end()  # or status raises the alarm that no version comes
    pulse.apply(old, pulse.diff(old, live))
    assert pulse.digest(old) == pulse.digest(live)
"""
SIGN = """
import pulse_rl as pulse, numpy as np
try:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
except ModuleNotFoundError:
    pulse.Publisher("signed", sign_with="key.pem")
key = Ed25519PrivateKey.generate()
pulse.Publisher("signed", sign_with=key).publish({"w": np.ones(9)}, version=0)
pulse.Subscriber("signed", public_key=key.public_key()).sync({"w": np.zeros(9)})
"""

# What uses each extra: Python, or a command line.
USES = {
    "torch": "import pulse_rl; pulse_rl.PulseLoCo",
    "run": "pulse-rl train --model tiny --steps 1 --out run",
    "follow": "from pulse_rl.engines.client import EngineClient; EngineClient('http://localhost:9')",
    "sign": SIGN,
    "study": "pulse-rl study gap -o report --html",
    "watch": "from pulse_rl.watch.live import LivePage; LivePage([])",
    "prometheus": "import pulse_rl.watch as watch; watch.to_prometheus()",
    "otel": "import pulse_rl.watch as watch; watch.to_opentelemetry()",
    "ft": "import pulse_rl; pulse_rl.Membership; pulse_rl.errors.require('torchft.coordination', 'ft')",
    "peft": "import pulse_rl.integrations.peft; pulse_rl.errors.require('peft', 'peft')",
    "lightning": "import pulse_rl.integrations.lightning",
    "axolotl": "import pulse_rl.integrations.axolotl",
}


def run(what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", what]
    if what.startswith("pulse-rl "):
        command = [str(Path(sys.executable).parent / "pulse-rl"), *what.split()[1:]]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, timeout=900)


def works(name: str, what: str) -> None:
    done = run(what)
    print(f"{name}: {'works' if done.returncode == 0 else 'FAILS'}")
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def fails_cleanly(extra: str, what: str, *, beside: list[str]) -> None:
    """In one line that names an extra which is not there either, and what installs it. Others may bring its needs."""
    done = run(what)
    if beside and done.returncode == 0:
        print(f"{extra}: works, by packages of {', '.join(beside)}")
        return
    line = (done.stderr.strip().splitlines() or [""])[-1]
    named = re.search(r"is needed for this and is not installed: .*\bpip install .*\[(\w+)\]", line)
    assert done.returncode == 1, (extra, done)
    assert named, (extra, line)
    print(f"{extra}: is not there: {line}")


def main(extras: list[str]) -> None:
    os.environ["PYTHONUTF8"] = "1"
    os.environ.pop("PYTHONPATH", None)  # it could lead to a source tree
    with TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        os.chdir(directory)
        for arguments in ("--help", "--version", "train --help", "plan --help"):
            works(f"pulse-rl {arguments}", f"pulse-rl {arguments}")
        works("without extras", PLAIN)
        for arguments in ("status gap", "inspect context", "verify context"):
            works(f"pulse-rl {arguments}", f"pulse-rl {arguments}")
        if "torch" in extras:
            program = re.search(r"```python\n(.*?)```", QUICKSTART.read_text(encoding="utf-8"), re.DOTALL)
            assert program
            works("quickstart", program[1])
        for extra, use in USES.items():
            if extra in extras:
                works(extra, use)
            else:
                fails_cleanly(extra, use, beside=extras)


if __name__ == "__main__":
    main(sys.argv[1:])
