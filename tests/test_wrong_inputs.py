"""What people get wrong gives one message of at most four lines, which names the place and the remedy.

Nothing else is printed or logged, and the traceback is that of one error: none of another program's comes before it.
"""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autocastfx
from autocastfx.cli.main import main

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Dynamo reads deprecated attributes of modules
]

LINES = 4
HERE = r"test_wrong_inputs\.py:\d+: "


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(4, 8), nn.Linear(8, 2), nn.Embedding(10, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        if ids is not None:
            x = x + self.table(ids)
        y = self.last(torch.relu(self.first(x)))
        return y if mask is None else y.masked_fill(mask[:, None], 0.0)


X = torch.ones(3, 4)
WRONG = torch.ones(3, 5)
CONTROL = "Call the model itself with these inputs: if that fails too"


def convert(inputs: Any = X, **options: Any) -> autocastfx.AmpModule:
    return autocastfx.convert(Net(), inputs, **{"dtype": "bfloat16", **options})


def call(*args: Any, **kwargs: Any) -> object:
    return convert()(*args, **kwargs)


def tuned(**options: Any) -> object:
    return autocastfx.tune(Net(), [X, X], lambda output, _: output.sum(), dtype="bfloat16", **options)


def listed(text: str | bytes) -> object:
    path = Path("mine.yaml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return convert(op_list=["default", path])


def planned(text: str) -> object:
    Path("mine.json").write_text(text, encoding="utf-8")
    return convert(plan="mine.json")


def told_of(place: str, called: str) -> str:
    return rf"\nAt .*{HERE}.*, {place}called with {called}\n{CONTROL}"


Act = Callable[[], object]
MIXED = "the conversion of Net was not compared .* mat1 and mat2 must have the same dtype, but got "
# By what is wrong: what is done, and what the message says, from its beginning.
INPUTS: dict[str, tuple[Act, str]] = {
    "too many": (lambda: convert((X, X, X, X)), r"the example inputs do not fit Net\.forward: too many positional"),
    "unknown name": (lambda: convert({"y": X}), r"the example inputs do not fit Net\.forward: missing .*'x'\. A dict"),
    "dict and keywords": (
        lambda: convert({"x": X}, example_kwargs={"ids": X}),
        "example_inputs is a dict, .* give one",
    ),
    "an array": (lambda: convert(X.numpy()), r"example_inputs is a tensor, .* not ndarray\. .*torch\.from_numpy"),
    "text": (lambda: convert("x"), r"example_inputs is a tensor, .* not str\. .* goes into a tuple: \(inputs,\)"),
    "a wrong size": (
        lambda: convert(WRONG),
        r"Net fails: a and b must have same reduction dim, but got \[3, 5\] X \[4, 8\]\."
        + told_of(r"in module 'first' \(Linear\), ", r"x=float32\[3, 5\]"),
    ),
    "no dimensions": (lambda: convert(torch.tensor(1.0)), r"(.*\n){2}" + CONTROL),
    "a mask's size": (
        lambda: convert((X, torch.ones(5, dtype=torch.bool))),
        "Net fails: .*broadcast.*" + told_of("", r"x=float32\[3, 4\], mask=bool\[5\]"),
    ),
    "a mask's dtype": (lambda: convert((X, torch.ones(3))), "Net fails: .*bool.*" + told_of("", ".*")),
    "indices' dtype": (
        lambda: convert({"x": X, "ids": torch.zeros(3)}),
        r"Net fails: .*'indices' .*Long, Int; but got torch\.float32.*"
        + told_of(r"in module 'table' \(Embedding\), ", r"x=float32\[3, 4\], ids=float32\[3\]"),
    ),
    "short indices": (
        lambda: convert({"x": X, "ids": torch.zeros(3, dtype=torch.int16)}),
        r"Net fails: .*'indices' .*Long, Int; but got torch\.int16.*" + told_of(r"in module 'table'.*", ".*"),
    ),
    "half": (lambda: convert(X.half()), rf"{MIXED}Half and Float"),
    "double": (lambda: convert(X.double()), rf"{MIXED}Double and Float"),
    "integers": (lambda: convert(X.long()), rf"{MIXED}Long and Float"),
    "a device": (
        lambda: convert(X.to("meta")),
        r"Net fails: Tensor device mismatch" + told_of(r"in module 'first'.*", ".*"),
    ),
    "call: a size": (
        lambda: call(WRONG),
        r"Net fails: a and b must have same reduction dim, but got \[3, (5|s\d+)\] X \[4, 8\]\.",
    ),
    "call: a dtype": (lambda: call(X.long()), "mat1 and mat2 must have the same dtype, but got Long and Float"),
    "call: nothing": (lambda: call(), "missing a required argument: 'x'"),
    "call: a name": (lambda: call(X, y=1), "got an unexpected keyword argument 'y'"),
    "call: an object": (
        lambda: call(object()),
        "argument x is an object of class object, .*Pass the tensors|Net fails|Net cannot be captured",
    ),
    "call of a copy": (
        lambda: pickle.loads(pickle.dumps(convert()))(WRONG),
        r"Net fails: a and b must have same reduction dim, but got \[3, 5\] X \[4, 8\]\.",
    ),
    "enabled: a size": (
        lambda: autocastfx.enable(Net(), dtype="bfloat16")(WRONG),
        r"Net fails: .*\[3, 5\] X \[4, 8\].*\nAt .*"
        + HERE
        + r".*, called with x=float32\[3, 5\]\nCall the model itself",
    ),
    "find_overflow: a size": (lambda: autocastfx.find_overflow(convert(), WRONG), "Net fails: a and b must have same"),
}
ARGUMENTS: dict[str, tuple[Act, str]] = {
    "a function": (lambda: autocastfx.convert(len, X), "convert takes an nn.Module, .*not builtin_function"),
    "a class": (lambda: autocastfx.convert(Net, X), "convert takes an nn.Module, .*not type: give an instance of Net"),
    "converted twice": (
        lambda: autocastfx.convert(convert(), X),
        "the model is converted already: convert the original",
    ),
    "dtype": (lambda: convert(dtype="float8"), r"dtype is torch\.float16 or torch\.bfloat16, not 'float8'"),
    "float32": (
        lambda: convert(dtype=torch.float32),
        r"dtype is torch\.float16 or torch\.bfloat16, not torch\.float32",
    ),
    "fold": (lambda: convert(fold="kernels"), "fold is one of 'none', 'exact', 'kernel', not 'kernels'"),
    "weights": (lambda: convert(weights="cache"), "weights is one of 'cast', 'cached', 'low', not 'cache'"),
    "recompose": (lambda: convert(recompose=["gelu"]), "recompose: there is no pattern 'gelu'; the patterns are"),
    "headroom": (lambda: convert(headroom=0.5), "headroom is a finite factor of at least 1, not 0.5"),
    "headroom: text": (lambda: convert(headroom="2"), "headroom is a finite factor of at least 1, not '2'"),
    "headroom: True": (lambda: convert(headroom=True), "headroom is a finite factor of at least 1, not True"),
    "keep_output_dtype": (lambda: convert(keep_output_dtype="no"), "keep_output_dtype is True or False, not 'no'"),
    "recompose: a number": (lambda: convert(recompose=3), "recompose is True, False or a sequence of names, not 3"),
    "sensitivity: a list": (lambda: convert(sensitivity=[1]), "sensitivity is a Sensitivity or .* file, not a list"),
    "device: a fraction": (lambda: convert(device=2.5), r"device=2\.5 is not a device that torch knows"),
    "inner": (lambda: autocastfx.enable(Net(), inner=3), "inner is the name of a backend .* or a function, not 3"),
    "report": (lambda: autocastfx.enable(Net(), report="yes"), "report is a function of a graph, not 'yes'"),
    "training": (lambda: autocastfx.calibrate(Net(), [X], training="eval"), "training is True, .* not 'eval'"),  # type: ignore
    "budget": (lambda: tuned(budget=0.01), r"budget is 'default', the name of a list, or a Budget, not 0\.01"),
    "held_out": (lambda: tuned(held_out="1"), "held_out is a count of batches, not '1'"),
    "gpu": (lambda: tuned(gpu=3), "gpu is the name of a GPU, or a Gpu, not 3"),
    "inputs": (lambda: tuned(inputs=0), "inputs is a function from a batch to the model's inputs, not 0"),
    "sensitivity: a path": (lambda: tuned(sensitivity="a.json"), r"sensitivity is what sensitivity\(\) returned, not"),
    "device": (
        lambda: convert(device="gpu"),
        r"device='gpu' is not a device that torch knows \(did you mean 'cuda'\?\)",
    ),
    "calibrate: nothing": (lambda: convert(calibrate=[]), "there are no batches to calibrate on"),
    "calibrate: a tensor": (lambda: convert(calibrate=X), r"batches is an iterable .*; write \[batch\] for one"),
    "dump: not converted": (
        lambda: autocastfx.dump(Net()),
        "dump shows what convert.* convert or enable the model first",
    ),
    "dump: a format": (lambda: autocastfx.dump(convert(), format="htm"), "format is .*'html', not 'htm'"),
    "explain": (lambda: autocastfx.explain(convert(), "linaer"), r".*is called 'linaer' \(did you mean 'linear'\?\)"),
    "optimizer": (lambda: autocastfx.LossScalingOptimizer(Net()), "LossScalingOptimizer wraps a torch.optim.Opt"),  # type: ignore
    "scale": (lambda: autocastfx.GradScaler(init_scale=-1), "init is a positive finite number, not -1"),
    "enabled twice": (
        lambda: autocastfx.enable(autocastfx.enable(Net())),
        "this Net is enabled already: call disable first",
    ),
    "enabled function": (lambda: autocastfx.enable(torch.relu), "enable takes an nn.Module, not a builtin_function_or"),  # type: ignore
    "enabled class": (lambda: autocastfx.enable(Net), "enable takes an nn.Module, not a class"),  # type: ignore
    "op_list: a number": (lambda: convert(op_list=3), r"op_list is a name, a path, .*, not int \(3\)"),
}
PAIR = (X, torch.zeros(3, dtype=torch.long))
BY_PART = r"does not fit Net\.forward: .*: inputs=lambda batch: batch\[0\]\."


def two(_: Any, other: Tensor) -> Tensor:
    return other.sum()


# What a first look at an example leads to.
FORMS: dict[str, tuple[Act, str]] = {
    "two inputs": (
        lambda: autocastfx.convert(Net(), X, X),  # type: ignore
        r".*not Tensor\. Several .* go in a tuple: convert\(model, ",
    ),
    "a dtype by place": (
        lambda: autocastfx.convert(Net(), X, "bfloat16"),  # type: ignore
        r".*not 'bfloat16'\. Options go by name: .*dtype=\"bfloat16\"\)",
    ),
    "a dtype alone": (lambda: autocastfx.convert(Net(), torch.float16), r".*Options go by name"),  # type: ignore
    "a pair": (lambda: convert((X, None, None, X)), r".*too many positional arguments\. .* alone, and no targets"),
    "check: pairs": (lambda: autocastfx.check(Net(), [(*PAIR, X, X)]), f".*{BY_PART}"),
    "sensitivity: pairs": (lambda: autocastfx.sensitivity(Net(), [(*PAIR, X, X)], two), f".*{BY_PART}"),
    "tune: pairs": (lambda: autocastfx.tune(Net(), [(*PAIR, X, X)] * 2, two), f".*{BY_PART}"),
    "check: a loss of targets": (
        lambda: autocastfx.check(Net(), [PAIR], two, inputs=lambda batch: batch[0]),
        r"loss_fn\(output, batch\) raised AttributeError: .* the whole batch, here a tuple of 2: ",
    ),
    "compare: a batch": (
        lambda: autocastfx.compare(None, convert(), PAIR),
        r"(.|\n)*[^.]\. The inputs .* go one by one: .*\*batch\)\.",
    ),
    "compare: targets": (lambda: autocastfx.compare(None, convert(), X, None, None, X), ".* alone, and no targets"),
    "compare: a loss of targets": (
        lambda: autocastfx.compare(None, convert(), X, gradients=True, loss=two),  # type: ignore
        r"loss takes the model's output alone, .*'other'\. It may read targets from around it",
    ),
}
FILES: dict[str, tuple[Act, str]] = {
    "no list": (lambda: convert(op_list="nope.yaml"), r"cannot read the op list nope\.yaml: No such file"),
    "no preset": (lambda: convert(op_list="bfloat17"), r"no preset is named 'bfloat17' \(did you mean 'bfloat16'\?\)"),
    "a dict": (lambda: convert(op_list={"allow": ["linear"]}), r"op_list takes no dict: autocastfx\.OpList\.of"),
    "a tab": (lambda: listed("allow:\n\t- linear\n"), r"mine\.yaml:2:1: .*Indent by spaces; YAML takes no tabs"),
    "a colon": (lambda: listed("allow: a: b\n"), r"mine\.yaml:1:9: .*Put text with a colon in quotes"),
    "a star": (lambda: listed("modules:\n  - {path: *.attn}\n"), r"mine\.yaml:2:13: .*in quotes: '\*\.attn'"),
    "no text": (lambda: listed(b"\xff\xfe\x00"), r"mine\.yaml:1:1: this is not UTF-8 text"),
    "empty": (lambda: listed(""), r"mine\.yaml:1:1: the file is empty\. A list has at least one category"),
    "a list": (lambda: listed("- linear\n"), r"mine\.yaml:1:1: expected 'key: value' lines, found a list"),
    "a key": (lambda: listed("alow: [linear]\n"), r"mine\.yaml:1:1: 'alow' is no key .*\(did you mean 'allow'\?\)"),
    "a key twice": (
        lambda: listed("allow: [mm]\nallow: [bmm]\n"),
        r"mine\.yaml:2:1: the key 'allow' stands twice.*Merge",
    ),
    "an op": (lambda: listed("allow: [linaer]\n"), r"mine\.yaml:1:9: no ATen op .*\(did you mean 'linear'\?\)"),
    "an import": (
        lambda: listed("deny: [F.softmax]\n"),
        r"mine\.yaml:1:8: 'F\.softmax' .*: write the op 'softmax', or",
    ),
    "a class": (lambda: listed("deny: [nn.LayerNorm]\n"), r"mine\.yaml:1:8: .*: write the op 'layer_norm', or"),
    "a device": (
        lambda: listed("deny:\n  - {reason: mine, ops: [mm], devices: [gpu]}\n"),
        r"mine\.yaml:2:41: no device type is named 'gpu' \(did you mean 'cuda'\?\)",
    ),
    "a category": (
        lambda: listed("modules:\n  - {path: first, category: fp32, reason: mine}\n"),
        r"mine\.yaml:2:29: .* not 'fp32' \(did you mean 'float32'\?\)",
    ),
    "extends": (lambda: listed("extends: default\n"), r"mine\.yaml:1:10: no preset is named 'default': .* needs no"),
    "no plan": (lambda: convert(plan="nope.json"), r"cannot read the plan nope\.json: No such file"),
    "no JSON": (lambda: planned("{"), r"mine\.json:1:2: this is not JSON: Expecting property name"),
    "no plan's key": (lambda: planned('{"a": 1}'), r"mine\.json:1:1: 'a' is no key of a plan\. Known: low, device"),
    "no ranges": (lambda: convert(calibrate="nope.json"), r"cannot read the ranges nope\.json: .*Ranges\.save writes"),
    "no folder": (lambda: autocastfx.dump(convert(), "no/a.html"), r"cannot write no/a\.html: the folder no does not"),
    "a folder": (lambda: autocastfx.dump(convert(), "."), r"cannot write \.: it is a folder; name a file in it"),
}


@pytest.mark.parametrize(
    ("act", "message"),
    [pytest.param(*case, id=name) for table in (INPUTS, ARGUMENTS, FORMS, FILES) for name, case in table.items()],
)
def test_a_wrong_input_is_one_short_message(
    act: Act, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()  # it names sizes by symbols once it has seen several
    with pytest.raises(Exception, match=rf"^['\"]?{message}") as caught:
        act()
    assert len(str(caught.value).splitlines()) <= LINES
    assert "".join(traceback.format_exception(caught.value)).count("Traceback (most recent call last)") == 1
    assert "".join(capfd.readouterr()) == ""


COMMANDS: dict[str, tuple[str, str]] = {
    "no module": ("dump nope:net --inputs float32[3,4]", "nope:net: there is no module 'nope' here"),
    "no attribute": (f"dump {__name__}:Nett --inputs float32[3,4]", r".* has no 'Nett' \(did you mean 'Net'\?\)"),
    "no spec": ("dump nope --inputs float32[3,4]", "cannot read 'nope': "),
    "an input": (f"dump {__name__}:Net --inputs float32", "cannot read the input 'float32': it is "),
    "a dtype": (
        f"dump {__name__}:Net --inputs float31[3]",
        r"the input .*'float31' is no dtype \(did you mean 'float32'",
    ),
    "a size": (
        f"dump {__name__}:Net --inputs float32[3,5]",
        "Net fails: a and b must have same reduction dim",
    ),
    "a list": (f"dump {__name__}:Net --inputs float32[3,4] --op-list nope.yaml", "cannot read the op list nope.yaml"),
    "an output": (f"dump {__name__}:Net --inputs float32[3,4] -o no/a.html", "cannot write no/a.html: the folder no"),
    "a node": (f"explain {__name__}:Net linaer --inputs float32[3,4]", r"no node, .*\(did you mean 'linear'\?\)"),
    "a file": ("dump nope.pt --trust --inputs float32[3,4]", ".*nope.pt"),
    "a plan": ("diff no.json nor.json", "cannot read the plan no.json: No such file"),
    "a preset": ("lists show bfloat17", r"no preset is named 'bfloat17' \(did you mean 'bfloat16'\?\)"),
    "a script": ("run nope.py", ".*nope.py"),
}


@pytest.mark.parametrize(("line", "message"), COMMANDS.values(), ids=COMMANDS)
def test_a_wrong_command_is_one_short_message(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) in (1, 2, 3)
    out, said = capfd.readouterr()
    assert out == ""
    assert re.match(f"autocastfx: error: {message}", said)
    assert len(said.splitlines()) <= LINES
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dumb net:model", r"autocastfx: error: .*'dumb'.* \(did you mean 'dump'\?\)\nautocastfx --help shows"),
        ("dump net:model --dtype fp16", r"autocastfx dump: error: .*'fp16'.* \(did you mean 'float16'\?\)\n.*--help"),
        ("dump net:model --inptus x", r"autocastfx: error: unrecognized arguments: --inptus x\nautocastfx --help"),
        ("dump", r"autocastfx dump: error: the following arguments are required: MODEL\nautocastfx dump --help"),
    ],
)
def test_wrong_arguments_are_two_lines(line: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    out, said = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert re.match(message, said)
    assert len(said.splitlines()) == 2


def test_there_are_fifty_and_more() -> None:
    assert len(INPUTS) + len(ARGUMENTS) + len(FORMS) + len(FILES) + len(COMMANDS) > 50
