"""Routers of one graph that know each other."""

from penstock.router.picker.links import TICK_REAL_S


def group_of(router):
    """What ties it to the others."""
    return router.server._group


def picker_among(routers):
    """The one router that picks; None while there is none that all others follow, as it has heard from them.

    One that believes alone that it picks may find an older claim yet.
    """
    found = [each for each in routers if group_of(each).is_picker]
    others = [each for each in routers if each not in found]
    if len(found) != 1 or not all(group_of(each).is_relay for each in others):
        return None
    return found[0] if group_of(found[0])._server.followers >= len(others) else None


async def start(harness, *workers, count=2, config=None, **settings):
    """Start routers that know each other; the first is the oldest, so it picks."""
    settings.setdefault("disaggregated", False)
    routers = []
    for _ in range(count):
        file = harness.write_state(workers, routers)
        routers.append(await harness.router(config=config or {}, ready=False, statefile=file, **settings))
        harness.write_state(workers, routers)
    await routers[0].until(lambda: picker_among(routers) is routers[0])
    for router in routers:
        await router.until(lambda router=router: not router.server.admission.problems())
    return routers


def stopwatch(router):
    """Return what tells the seconds since now by a router's ticks, which a busy machine delays with all that it times."""
    group = group_of(router)
    began = group._ticks
    return lambda: (group._ticks - began) * TICK_REAL_S


async def cut(router):
    """Let a router vanish for the others, as if it were killed; it continues by itself."""
    server = router.server
    server._tasks[0].cancel()
    await group_of(router).close()
    await server._http.close(grace_s=0)
