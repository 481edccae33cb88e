import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, LeaseExpired, Overloaded
from kvstore.lease import RightsTable


def table(**settings) -> RightsTable[str]:
    given = {"rights_max": 100, "ttl_s_default": 10.0, "ttl_s_max": 60.0} | settings
    return RightsTable("lease", LeaseExpired, **given)


def test_a_right_holds_until_its_time_and_not_at_it():
    rights = table()
    right, ttl_s = rights.grant("a", 0.0, None)
    assert ttl_s == 10.0
    assert rights.get(right.id, 9.999).held == "a"
    with pytest.raises(LeaseExpired, match=str(right.id)):
        rights.get(right.id, 10.0)
    assert [r.held for r in rights.expire(10.0)] == ["a"]
    assert rights.expire(10.0) == []
    assert len(rights) == 0


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
def test_a_lifetime_is_above_zero(ttl_s):
    with pytest.raises(InvalidRequest, match="ttl_s"):
        table().grant("a", 0.0, ttl_s)


def test_a_lifetime_is_cut_to_the_most():
    rights = table()
    assert rights.grant("a", 0.0, 1e9)[1] == 60.0


def test_renewing_never_shortens():
    rights = table()
    right, _ = rights.grant("a", 0.0, 50.0)
    assert rights.renew(right.id, 1.0, 5.0) == 49.0
    assert rights.renew(right.id, 1.0, 60.0) == 60.0
    assert rights.expire(50.0) == []
    assert [r.held for r in rights.expire(61.0)] == ["a"]
    with pytest.raises(LeaseExpired):
        rights.renew(right.id, 61.0, None)


def test_ending_is_idempotent():
    rights = table()
    right, _ = rights.grant("a", 0.0, None)
    assert rights.end(right.id) is right
    assert rights.end(right.id) is None
    assert rights.expire(100.0) == []


def test_there_is_a_most():
    rights = table(rights_max=2)
    first, _ = rights.grant("a", 0.0, None)
    rights.grant("b", 0.0, None)
    with pytest.raises(Overloaded, match="2 leases"):
        rights.grant("c", 0.0, None)
    rights.end(first.id)
    rights.grant("c", 0.0, None)


def test_ids_count_up_from_the_first_and_are_not_used_again():
    rights = table(first_id=1000)
    ids = []
    for _ in range(3):
        right, _ = rights.grant("a", 0.0, None)
        ids.append(right.id)
        rights.end(right.id)
    assert ids == [1000, 1001, 1002]


steps = st.lists(
    st.tuples(
        st.sampled_from(["grant", "renew", "end", "expire"]),
        st.integers(0, 12),
        st.floats(0.1, 70.0),
        st.floats(0.0, 8.0),
    ),
    max_size=60,
)


@given(steps)
def test_expiry_is_that_of_a_simple_model(steps):
    rights, model, now = table(), {}, 0.0
    for what, which, ttl_s, passed in steps:
        now += passed
        right_id = 1 + which
        if what == "grant":
            right, granted = rights.grant("x", now, ttl_s)
            model[right.id] = now + granted
        elif what == "renew" and model.get(right_id, 0) > now:
            left = rights.renew(right_id, now, ttl_s)
            model[right_id] = max(model[right_id], now + min(ttl_s, 60.0))
            assert left == pytest.approx(model[right_id] - now)
        elif what == "renew":
            with pytest.raises(LeaseExpired):
                rights.renew(right_id, now, ttl_s)
        elif what == "end":
            assert (rights.end(right_id) is not None) == (model.pop(right_id, None) is not None)
        elif what == "expire":
            over = {i for i, at in model.items() if at <= now}
            assert {r.id for r in rights.expire(now)} == over
            model = {i: at for i, at in model.items() if i not in over}
        rights.check_integrity()
        assert len(rights) == len(model)
        due = rights.next_expiry_s()
        assert due is None if not model else due is not None and due <= min(model.values())


def test_renewing_for_ever_costs_no_memory():
    rights = table()
    right, _ = rights.grant("a", 0.0, None)
    for now in range(10_000):
        rights.renew(right.id, float(now), 10.0)
        other, _ = rights.grant("b", float(now), None)
        rights.end(other.id)
    assert len(rights._heap) < 100
