"""What of a container's script becomes its command."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtimes.dynamo.importer.command import NO_CONNECTOR, NOT_COMPUTED, NOT_RUN, parse_command

VLLM = "python3 -m dynamo.vllm"


def parsed(script, *arguments, variables=None):
    """The command of a shell's script."""
    return parse_command(["/bin/bash", "-c", script, *arguments], variables or {"MODEL": "m/x y"})


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"exec {VLLM} \\\n  --model a \\\n  --seed 1\n", ["--model", "a", "--seed", "1"]),
        (f"{VLLM} --model $MODEL --x ${{MODEL}}", ["--model", "m/x y", "--x", "m/x y"]),
        (f'{VLLM} --model "$MODEL"', ["--model", "m/x y"]),
        (f'{VLLM} --eplb-config \'{{"a":"$MODEL|;"}}\'', ["--eplb-config", '{"a":"$MODEL|;"}']),
        (f"set -euo pipefail\n# start\n{VLLM} --a 2>&1", ["--a"]),
        (f"export A=1\n/opt/venv/bin/{VLLM} --a $A", ["--a", "1"]),
    ],
)
def test_a_script_with_one_command_is_read_whole(script, words):
    """Joined lines, stated variables and quoted parts as they stand; a shell's own options mean nothing here."""
    command = parsed(script)
    assert (command.module, command.words, command.left_out) == ("dynamo.vllm", words, [])


def test_a_script_takes_its_arguments():
    """As LMCache's sample gives them: after the script's name."""
    assert parsed(f'exec {VLLM} "$@" --z', "--", "--model", "a b").words == ["--model", "a b", "--z"]
    assert parsed(f'{VLLM} "$@"').words == []


def test_variables_before_the_command_and_exported_ones_are_its_environment():
    """Both forms; the nearer one wins. A variable of the script alone is filled in, and is none of its command's."""
    command = parsed(f"export A=1 B=2\nC=4\nB=3 {VLLM} --a $C")
    assert command.env == {"A": "1", "B": "3"}
    assert command.words == ["--a", "4"]
    assert command.left_out == []


@pytest.mark.parametrize(
    ("script", "left_out"),
    [
        (f"{VLLM} --a 2>&1 | tee -a /w/log", ("tee -a /w/log", NOT_RUN)),
        (f"export PATH=$PATH:/x\n/sbin/ldconfig\n{VLLM} --a", ("export PATH=$PATH:/x; /sbin/ldconfig", NOT_RUN)),
        (f"f() {{\n  kill $pid || true\n}}\n{VLLM} --a &\nwait", ("f() {; kill $pid; true; }; wait", NOT_RUN)),
        (f"{VLLM} --a > /w/log", ("> /w/log", NOT_RUN)),
        (f'{VLLM} --kv-transfer-config "$(cat /etc/x.json)" --a', ("--kv-transfer-config $(cat /etc/x.json)", NO_CONNECTOR)),
        (f"{VLLM} --x=$UNKNOWN --a", ("--x=$UNKNOWN", NOT_COMPUTED)),
        (f"{VLLM} --x `hostname` --a", ("--x `hostname`", NOT_COMPUTED)),
        (f"RANK=$UNKNOWN {VLLM} --a", ("RANK=$UNKNOWN", NOT_COMPUTED)),
        (f"{VLLM} --a ${{MODEL:-b}}", ("--a ${MODEL:-b}", NOT_COMPUTED)),
    ],
)  # fmt: skip
def test_what_only_a_shell_can_do_is_left_out_by_name(script, left_out):
    """Other statements, pipes and files; values that are computed, with the flag that needs them."""
    command = parsed(script)
    assert command.module == "dynamo.vllm"
    assert command.words == ([] if left_out[0].startswith("--a") else ["--a"])
    assert command.left_out == [left_out]


@pytest.mark.parametrize(
    "script",
    [f"if a; then {VLLM}; else {VLLM} --b; fi", f"{VLLM} --a & {VLLM} --b", "a && b", f"{VLLM} 'open", ""],
)
def test_a_script_that_starts_dynamo_by_no_command_or_several_is_not_read(script):
    """Nothing is guessed."""
    assert parsed(script) is None or parsed(script).module is None


@given(st.text(alphabet="ab '\"\\$(){}<>|&;=\n#`\x00\ue0001@-", max_size=60))
def test_any_script_is_read_or_not(text):
    """No text ends in a traceback, and no word of a command holds what was not computed."""
    for script in (text, f"{VLLM} {text}"):
        command = parsed(script)
        assert command is None or not any("\ue000" in word for word in command.words)
