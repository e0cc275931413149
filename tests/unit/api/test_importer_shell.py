"""What of a container's script becomes its command."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtimes.dynamo.importer.command import NO_CONNECTOR, NOT_COMPUTED, NOT_RUN, parse_command

VLLM = "python3 -m dynamo.vllm"


def parsed(script, *arguments):
    """The command of a shell's script."""
    return parse_command(["/bin/bash", "-c", script, *arguments], {"MODEL": "m/x"})


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"exec {VLLM} \\\n  --model a \\\n  --seed 1\n", ["--model", "a", "--seed", "1"]),
        (f'{VLLM} --model $MODEL --x "${{MODEL}}"', ["--model", "m/x", "--x", "m/x"]),
        (f"/opt/venv/bin/{VLLM} --a 2>&1", ["--a"]),
        (f'exec {VLLM} "$@" --z', ["--model", "a b", "--z"]),
    ],
)
def test_a_script_with_one_command_is_read_whole(script, words):
    """Joined lines, stated variables, quoted parts and the script's own arguments."""
    command = parsed(script, "--", "--model", "a b")
    assert (command.module, command.words, command.left_out) == ("dynamo.vllm", words, [])


@pytest.mark.parametrize(
    "script",
    [
        f"A=1 {VLLM} --a | tee -a /w/log",
        f"set -e\n/sbin/ldconfig\nA=1 {VLLM} --a > /w/log",
        f"wait() {{ kill $pid; }}; A=1 {VLLM} --a &\nwait",
    ],
)
def test_what_stands_beside_the_command_is_listed(script):
    """The variables before the command are its environment."""
    command = parsed(script)
    assert (command.words, command.env, command.left_out) == (["--a"], {"A": "1"}, [(script, NOT_RUN)])


@pytest.mark.parametrize(
    ("script", "left_out"),
    [
        (
            f'{VLLM} --kv-transfer-config "$(cat /etc/x.json)" --a',
            ("--kv-transfer-config $(cat /etc/x.json)", NO_CONNECTOR),
        ),
        (f"{VLLM} --x=$UNKNOWN --a", ("--x=$UNKNOWN", NOT_COMPUTED)),
        (f"{VLLM} --x `hostname` --a", ("--x `hostname`", NOT_COMPUTED)),
        (f"RANK=$UNKNOWN {VLLM} --a", ("RANK=$UNKNOWN", NOT_COMPUTED)),
    ],
)
def test_what_only_a_shell_can_compute_is_left_out_by_name(script, left_out):
    """With the flag that needs it."""
    command = parsed(script)
    assert (command.words, command.left_out) == (["--a"], [left_out])


@pytest.mark.parametrize(
    "script", [f"{VLLM} --a & {VLLM} --b", "a && b", f"{VLLM} 'open", "python3 -m m", ""]
)
def test_a_script_that_starts_dynamo_by_no_command_or_several_is_not_read(script):
    """Nothing is guessed."""
    assert parsed(script) is None


@given(st.text(alphabet="ab '\"\\$(){}<>|&;=\n#`\x00@-", max_size=60))
def test_any_script_is_read_or_not(text):
    """No text ends in a traceback."""
    for script in (text, f"{VLLM} {text}"):
        assert parsed(script) is None or parsed(script).module == "dynamo.vllm"
