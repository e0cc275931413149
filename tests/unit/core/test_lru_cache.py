"""The bounded memory of what was used last."""

from __future__ import annotations

from penstock.core.lru_cache import LruCache


def test_what_was_used_last_stays():
    """Beyond the limit the entry goes that has not been used for longest."""
    recent = LruCache(2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert [recent.get(each) for each in "abc"] == [1, None, 3]
