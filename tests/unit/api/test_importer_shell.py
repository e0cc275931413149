"""What the importer reads in a script is what a real shell would have passed on, or it is named as left out."""

import shutil
import subprocess

import pytest

from penstock_dynamo.importer.command import NOT_RUN, parse_command

BASH = shutil.which("bash")
ENV = {"A": "env", "B": "e 2"}
STATEMENTS = (
    *("export A=b", "A=b", "A='x y'", 'A="x $B"', "B=$A", "export A=1 B=$A", "A=b # c", "# A=no", "A=5;B=6", "A=5 B=6"),
    *("A=$A$B", "A=${A}c", "A=\\$x", 'A="a\\"b"', "A=", "A=''", "A=x\\\ny", "A=b 2>/dev/null", "A=b|cat", "A=1 &", "A+=z"),
    *("export B=$(echo q)", "B=`echo r`", "A=$((1+2))", "A=~", "(A=4)", "{ A=4; }", "A=1 true", "A[0]=3", "let A=3"),
    *("unset A", "export A", "export -n A", "declare A=3", "eval A=9", "read A < /dev/null", "printf -v A hi", ": ${A:=d}"),
    *("if true; then A=zz; fi", "if false; then A=zz; fi", "true && A=2", "false && A=2", "false || A=9", "cd / && A=k"),
    *('[ -n "$A" ] && A=new', "if [ -z ]\nthen\nA=n\nelse\nA=m\nfi", "for A in 1 2; do :; done", "while false; do A=1; done"),
    *("f() { A=3; }\nf", "case x in x) A=4;; esac", "true\nA=1 && false\nB=$A", "export A=1 && export B=$A", "! A=2", "time A=2"),
)  # fmt: skip
USES = ('--a $A --b "$B"', '--a="${A}/x" $B', "--a '$A' --c")


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_a_script_is_read_as_bash_reads_it(tmp_path):
    """Over statements that assign, compute, fail or do nothing; what is left out makes no claim."""
    stub = tmp_path / "python3"
    stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    stub.chmod(0o755)
    judged = 0
    for statement in STATEMENTS:
        for use in USES:
            script = f"{statement}\npython3 -m dynamo.vllm {use}"
            found = parse_command(["bash", "-c", script], ENV)
            if any(why != NOT_RUN for _, why in found.left_out):
                continue
            done = subprocess.run(
                [BASH, "-c", script],
                env={**ENV, "PATH": f"{tmp_path}:/usr/bin:/bin"},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert ["-m", "dynamo.vllm", *found.words] == done.stdout.split("\0")[:-1], script
            judged += 1
    assert judged > len(STATEMENTS)
