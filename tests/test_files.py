"""Files in a work directory, which may contain anything."""

import concurrent.futures
import os
import pathlib

import pytest
from programs import tiny
from programs.acts import limit_file_size

from jaxloop import checkpoint, every
from jaxloop.base import files

KINDS = {
    "a FIFO": os.mkfifo,
    "a directory": os.mkdir,
    "a symbolic link": lambda path: path.symlink_to(path.parent / "precious"),
    "a device": lambda path: os.mknod(path, 0o020666, os.makedev(1, 7)),  # Like /dev/full.
}


def put(kind, path):
    path.parent.mkdir(exist_ok=True)
    (path.parent / "precious").write_text("keep me")
    try:
        KINDS[kind](path)
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("mode", ["rb", "ab", "w"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(kind, mode, tmp_path):
    put(kind, tmp_path / "file")
    with pytest.raises(OSError, match="Expected a regular file"):
        files.open_file(tmp_path / "file", mode)
    assert (tmp_path / "precious").read_text() == "keep me"


def test_read_bytes_is_bounded(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="has more than 4 bytes"):
        files.read_bytes(tmp_path / "file", 4)


@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"a":' * 1_000_000])
def test_deeply_nested_json_raises_value_error(text):
    with pytest.raises(ValueError, match="nested too deeply"):
        files.parse_json(text)


def experiment(directory):
    return tiny.experiment(directory=directory, saves=every(steps=5))(tiny.STATE, tiny.BATCHES, train_total_steps=10)


@pytest.mark.parametrize("name", ["history.jsonl", ".write_probe", "STOPPED"])
@pytest.mark.parametrize("kind", KINDS)
def test_run_opens_only_regular_files(kind, name, tmp_path):
    directory = tmp_path / "run"
    put(kind, directory / name)
    if name == "STOPPED":  # It is removed at the start of each run.
        experiment(directory)
        assert pathlib.Path(directory / name).read_bytes() == b""
    else:
        with pytest.raises(OSError, match="Expected a regular file"):
            experiment(directory)
    assert (directory / "precious").read_text() == "keep me"


def test_a_directory_can_be_prepared_by_several_processes_at_the_same_time(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert {*pool.map(files.prepare_directory, [tmp_path / "run"] * 1000)} == {tmp_path / "run"}
    assert not list((tmp_path / "run").iterdir())


def test_damaged_checkpoint_is_not_moved_through_a_symlink(tmp_path, caplog):
    directory, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    experiment(directory)
    elsewhere.mkdir()
    (directory / "damaged").symlink_to(elsewhere)
    (directory / "10" / "run" / "metadata").write_text("{}")
    assert checkpoint.restore_newest(directory, tiny.STATE)[1] == 5
    assert "could not be moved" in caplog.text and "symbolic link" in caplog.text
    assert not list(elsewhere.iterdir()) and (directory / "10").exists()


def test_a_failed_write_leaves_the_file_unchanged(tmp_path):
    path = tmp_path / "history.jsonl"
    files.write_atomically(path, b"before")
    with limit_file_size(1_000), pytest.raises(OSError, match="File too large"):
        files.write_atomically(path, b"after" * 1_000)
    assert path.read_bytes() == b"before"
