import pathlib
import re

import jax
import pytest

import jaxloop

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL)


def test_the_programs_in_the_readme_run_and_print_what_it_says(capsys, monkeypatch, tmp_path, writer):
    monkeypatch.chdir(tmp_path)
    writer.write_hparams, writer.close = lambda hparams: None, lambda: None
    monkeypatch.setattr(jaxloop.fitting, "default_writer", lambda workdir: writer)
    ((program,), continued) = blocks("python"), blocks("python continued")
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):  # As a user has it.
        exec(program, names)
        printed = capsys.readouterr().out.strip()
        for block in continued:
            exec(block, names)
            names.setdefault("histories", []).append(names.get("history"))
    assert re.fullmatch(r"step 600: test accuracy \d\d\.\d%", printed)
    claimed = re.search(r"prints `step 600: test accuracy ([\d.]+)%`", README)
    assert claimed and float(printed.split()[-1][:-1]) == pytest.approx(float(claimed[1]), abs=1.0)
    assert int(names["state"].step) == 300
    printed = capsys.readouterr()
    assert "[250, 500, 600] 600 steps in " in printed.out
    assert "600/600 [==============================]" in printed.err

    assert "of a device's memory" in printed.out

    assert re.search(r"params/Dense_1/kernel +\[64, 128\] +float32 +P\(None, 'data'\) +4.0 KiB\n", printed.out)
    _, _, _, functions, by_hand, fit, own_steps, _ = names["histories"]
    assert functions.collect("steps", "loss") == by_hand.collect("steps", "loss")
    assert functions.collect("accuracy")[-1] > 0.9
    assert fit.collect("steps", "eval.accuracy")[0] == list(range(20, 601, 20))
    assert fit.last("eval.accuracy")[1] > 0.9
    assert own_steps.last("eval.accuracy")[1] > 0.85
    assert len(names["figure"].axes) == 2


def test_the_example_is_short():
    (program,) = blocks("python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 40
