"""Services are renamed and take other roles under load: no request is lost, and no moment takes more GPUs than the budget."""

from __future__ import annotations

import pytest
from operating import BudgetWatch, pods_of, process, until
from serving import NAMESPACE, ROLLED_S, served, worker

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

BUDGET = 3
"""Room for one worker more than serve."""


async def test_a_service_is_renamed_though_the_operator_dies_half_way(own, tmp_path):
    """The next operator continues while both names have pods."""
    plane, client = own
    async with (
        served(plane, client, tmp_path, planner={"maxGpuBudget": BUDGET}) as serving,
        BudgetWatch(client, NAMESPACE).on() as budget,
    ):

        async def half_way():
            return await pods_of(client, NAMESPACE, "decoder")

        with process(plane.kubeconfig, NAMESPACE):
            await serving.edit({"services": {"decode": None, "decoder": worker("decode")}})
            await until(half_way, "a pod of the new name", timeout_s=ROLLED_S)
            assert await pods_of(client, NAMESPACE, "decode")
            serving.operator.kill()
            await serving.change("the rename", {"inheritedAnnotations": ["a"]})
            assert await pods_of(client, NAMESPACE, "decode") == []
    assert serving.load.lost == []
    assert budget.most == BUDGET


@pytest.mark.nightly
async def test_two_roles_become_one_and_two_again(own, tmp_path):
    """Prefill and decode become aggregated workers, and those become prefill and decode."""
    plane, client = own
    split = {"prefill": worker("prefill"), "decode": worker("decode")}
    together = {"worker": worker("aggregated")}
    async with (
        served(plane, client, tmp_path, planner={"maxGpuBudget": BUDGET}) as serving,
        BudgetWatch(client, NAMESPACE).on() as budget,
    ):
        await serving.change("one role", {"services": {**dict.fromkeys(split), **together}})
        await serving.change("two roles", {"services": {**dict.fromkeys(together), **split}})
    assert serving.lost == {}
    assert budget.most <= BUDGET
