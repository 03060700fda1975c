"""`hf_hybrid/files.py`: small files are replaced whole or not at all, and JSON holds every number."""

import json
import math
import os

import numpy as np
import pytest
import torch

from hf_hybrid.files import delete_temporaries, open_to_append, own_folder, plain, write_json, write_note, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    write_text(path, "first")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "second")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["README.md"]


def test_a_note_that_cannot_be_written_is_only_warned_of(tmp_path, caplog):
    write_note(tmp_path / "absent" / "note.json", {"a": 1})
    assert "note.json` could not be written, and training goes on without it" in caplog.text
    write_note(tmp_path / "note.json", {"a": 1})
    assert json.loads((tmp_path / "note.json").read_text()) == {"a": 1}


def test_what_lies_in_the_way_of_a_temporary_file_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    precious = tmp_path / "precious"
    precious.write_text("of another user")
    (tmp_path / "_hybrid_tmp-guessed-README.md").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "README.md", "mine")
    assert precious.read_text() == "of another user" and "README.md" not in os.listdir(tmp_path)


def test_checkpoints_get_infinity_back_and_logs_show_none(tmp_path):
    values = {
        1: [math.inf, -math.inf, math.nan],
        "scalars": (torch.tensor(2.5), np.float32(math.inf), np.int64(3), True),
    }
    assert plain(values) == {"1": [None, None, None], "scalars": [2.5, None, 3, True]}
    write_json(tmp_path / "state.json", values)
    read = json.loads((tmp_path / "state.json").read_text(), parse_constant=pytest.fail)
    assert read == {"1": ["inf", "-inf", None], "scalars": [2.5, "inf", 3, True]}
    assert float(read["1"][1]) == -math.inf


def test_links_are_replaced_or_refused_and_what_they_lead_to_is_left_alone(tmp_path):
    precious, link = tmp_path / "precious", tmp_path / "README.md"
    precious.write_text("of another user")
    link.symlink_to(precious)
    with pytest.raises(OSError):
        open_to_append(link)
    write_text(link, "mine")
    assert precious.read_text() == "of another user" and link.read_text() == "mine" and not link.is_symlink()
    with open_to_append(link) as file:
        file.write(b", and more")
    assert link.read_text() == "mine, and more"


def test_a_file_is_written_though_another_process_deletes_its_temporary_file(tmp_path, monkeypatch):
    """A training that begins cannot tell it from what a kill left."""
    fsync, calls = os.fsync, []

    def flushed(handle):
        fsync(handle)
        calls.append(len(calls))
        if calls == [0]:
            delete_temporaries(tmp_path)

    monkeypatch.setattr(os, "fsync", flushed)
    write_text(tmp_path / "README.md", "mine")
    assert (tmp_path / "README.md").read_text() == "mine" and calls == [0, 1] and os.listdir(tmp_path) == ["README.md"]


@pytest.mark.parametrize("leads_to", ["home", "nowhere", "notes"])
def test_a_folder_of_its_own_takes_the_place_of_a_link(tmp_path, caplog, leads_to):
    (tmp_path / "home" / "comparison").mkdir(parents=True)
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report").symlink_to(f"../{leads_to}")
    made = own_folder(tmp_path / "run", "report", "comparison")
    assert made == tmp_path / "run" / "report" / "comparison" and made.is_dir() and not made.parent.is_symlink()
    assert f"was a link to `../{leads_to}`" in caplog.text
    (tmp_path / "linked").symlink_to(tmp_path / "run")  # what the user named may be a link
    assert own_folder(tmp_path / "linked", "report").is_dir() and (tmp_path / "linked").is_symlink()
    assert (tmp_path / "home" / "comparison").is_dir() and (tmp_path / "notes").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_what_is_private_is_for_the_user_alone(tmp_path):
    open_to_append(tmp_path / "log", private=True).close()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
