"""Check the wheel and the sdist in a folder: what they hold, and that each installs and runs.

    python tools/check_dist.py [dist]

Each is installed without its dependencies into a new environment, which takes those of the Python
that runs this. Nothing is downloaded but, for the sdist, the build backend.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path
from sysconfig import get_path

WEIGHTS = "kvfold/data/reference/gqa/model.safetensors"
LARGEST = 60 * 2**20  # bytes of either file: PyPI takes 100 MiB


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel holds the package with its reference weights alone, the sdist the tests too."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert WEIGHTS in names, f"the wheel lacks {WEIGHTS}"
    strangers = {name.split("/")[0] for name in names if not name.startswith("kvfold")}
    assert not strangers, f"the wheel holds {sorted(strangers)}"
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    for name in (f"src/{WEIGHTS}", "tests/conftest.py", "docs/start.md", "pyproject.toml"):
        assert name in files, f"the sdist lacks {name}"
    for path in (wheel, sdist):
        size = path.stat().st_size
        assert size < LARGEST, f"{path.name} has {size} bytes, more than {LARGEST}"
        print(f"{path.name}: {size / 2**20:.1f} MiB")


def check_install(package: Path) -> None:
    """Install a wheel or sdist into a new environment and run the command."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "env"
        venv.create(home, with_pip=False)
        python = home / "bin/python"
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
        run(*pip, "--no-deps", package)
        # After the installation, so that pip sees a bare environment. A path file appends: what
        # was installed here comes first, before an editable kvfold of the other environment.
        (site / "others.pth").write_text(get_path("purelib"), encoding="utf-8")
        where = run(python, "-c", "import kvfold; print(kvfold.__file__)", cwd=folder)
        assert Path(where).is_relative_to(home), f"kvfold was imported from {where}"
        print(
            run(home / "bin/kvfold", "--version", cwd=folder).splitlines()[0], f"({package.name})"
        )
        assert "gqa" in run(home / "bin/kvfold", "inspect", "reference:gqa", cwd=folder)


def run(*command: object, cwd: str | None = None) -> str:
    """The stripped stdout of a command that must succeed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(x) for x in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "dist")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_contents(wheel, sdist)
    for package in (wheel, sdist):
        check_install(package)


if __name__ == "__main__":
    main()
