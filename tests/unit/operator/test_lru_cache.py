from penstock.operator.memory import LruCache


def test_what_was_used_last_stays():
    """Beyond the limit the entry goes that nobody asked for longest."""
    recent = LruCache(2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert [recent.get(each) for each in "abc"] == [1, None, 3]
