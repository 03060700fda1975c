"""
Write the cards of this folder anew: run examples that push to a Hub on this machine, and keep the cards that arrive.

    python model_cards/generate.py
    python model_cards/generate.py small-llama

Each card names the command that made it. Takes about ten minutes on two CPU cores; needs no network and no account.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from rig.hub_server import LocalHub, card_errors  # noqa: E402

USER = "your-name"
QUICKSTART = "examples/01_quickstart.py --compare_with_trainer False --push_to_hub True --hub_model_id"
COMMANDS = {
    "quickstart": f"{QUICKSTART} {USER}/quickstart",
    "quickstart-streamed": f"{QUICKSTART} {USER}/quickstart-streamed --memory stream --gradient_accumulation_steps 2 "
    "--max_steps 60",
    "small-llama": f"examples/09_push_to_hub.py --repo_id {USER}/small-llama --dry_run False --license apache-2.0",
}


def make(name: str) -> str:
    """Run one command against a Hub of its own; the card as it was pushed."""
    with LocalHub(user=USER) as hub, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(HERE.parent / "examples")
        environment = hub.environment(Path(folder) / "home")
        subprocess.run([sys.executable, *COMMANDS[name].split()], cwd=folder, env=environment, check=True)
        card = hub.repos[f"{USER}/{name}"].files()["README.md"].decode()
    if errors := card_errors(card):
        raise SystemExit(f"The card of `{name}` is not one that the Hub takes: {'; '.join(errors)}")
    return card


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"Cards to write: {', '.join(COMMANDS)}. Default: all.")
    names = parser.parse_args().names or list(COMMANDS)
    for name in names:
        if name not in COMMANDS:
            parser.error(f"there is no command for a card `{name}`")
        (HERE / f"{name}.md").write_text(make(name), encoding="utf-8")


if __name__ == "__main__":
    main()
