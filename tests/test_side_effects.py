"""Importing the package changes nothing of other packages, and training sends nothing."""

import os
import subprocess
import sys
from pathlib import Path


def test_importing_changes_nothing():
    """No patching: after importing every module, all functions, classes and methods of others are those they ship."""
    program = Path(__file__).parent / "rig" / "import_everything.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_is_sent(tmp_path):
    """Importing, training, saving and writing a card open no connection and look up no address, without any switch."""
    code = (
        "import socket, sys\n"
        "tried = []\n"
        "def refuse(*args, **kwargs):\n"
        "    tried.append(args)\n"
        "    raise OSError('no connection in this test')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.socket.sendto = refuse\n"
        "socket.create_connection = socket.getaddrinfo = socket.gethostbyname = refuse\n"
        "from hf_hybrid import HybridTrainer, MemoryProfilerCallback\n"
        "import conftest, huggingface_hub\n"
        "assert not huggingface_hub.constants.HF_HUB_OFFLINE\n"
        "args = conftest.hybrid_config(sys.argv[1], max_steps=10, save_strategy='steps', save_steps=5)\n"
        "options = {'train_dataset': conftest.ByteText(100), 'callbacks': [MemoryProfilerCallback()]}\n"
        "trainer = HybridTrainer(conftest.tiny_model(), args, **options)\n"
        "trainer.train()\n"
        "trainer.save_model()\n"
        "trainer.create_model_card()\n"
        "assert trainer.hybrid_summary()['leaps'] and not tried, tried\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    paths = os.pathsep.join(str(path) for path in Path(__file__).parents[:2])
    environment |= {"PYTHONPATH": paths, "HF_HOME": str(tmp_path / "hf")}
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
