from penstock.operator.lru_cache import LruCache


def test_what_was_used_last_stays():
    """Beyond the limit the entry goes that nobody asked for longest."""
    recent = LruCache(2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert [recent.get(each) for each in "abc"] == [1, None, 3]


def test_what_is_forgotten_is_gone():
    """Also what was never there can be forgotten."""
    recent = LruCache(2)
    recent.put("a", 1)
    recent.forget("a")
    recent.forget("b")
    assert recent.get("a") is None


def test_a_new_value_takes_the_old_ones_place():
    """One key holds one value and counts once."""
    recent = LruCache(2)
    for value in range(5):
        recent.put("a", value)
    recent.put("b", 9)
    assert (recent.get("a"), recent.get("b")) == (4, 9)
