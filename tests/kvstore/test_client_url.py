"""Store URLs, right and wrong."""

import pytest

from kvstore import connect
from kvstore.client.url import parse_url
from kvstore.errors import ConfigError, InvalidRequest, UnsupportedURL


@pytest.mark.parametrize(
    ("text", "scheme", "target"),
    [
        ("file:///var/kv", "file", None),
        ("file:///var/with%20space", "file", None),
        ("unix:///run/kv.sock", "unix", "unix:/run/kv.sock"),
        ("dns:///localhost:7700", "dns", "dns:///localhost:7700"),
        ("dns:///127.0.0.1:7700", "dns", "dns:///127.0.0.1:7700"),
        ("dns:///[::1]:7700", "dns", "dns:///[::1]:7700"),
    ],
)
def test_known_forms(text: str, scheme: str, target: str | None) -> None:
    url = parse_url(text)
    assert url.scheme == scheme
    if target is not None:
        assert url.grpc_target == target
    else:
        assert url.path.is_absolute()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "file:///dir"),
        ("/var/kv", "file:///dir"),
        ("http://localhost:80", "file:///dir, unix:///path/of.sock or dns:///host:port"),
        ("redis://localhost", "scheme"),
        ("file://var/kv", "file:///var/kv"),
        ("file:///", "absolute path"),
        ("file:kv", "absolute path"),
        ("unix://run/kv.sock", "unix:///run/kv.sock"),
        ("unix:///" + "s" * 120, "107 B"),
        ("dns:///localhost", "host:port"),
        ("dns:///:7700", "host:port"),
        ("dns:///localhost:99999", "0 to 65535, not .localhost:99999."),
        ("dns:///localhost:port", "port"),
        ("file:///kv?dram=1", "data= and one of auto, grpc, port, shared"),
        ("file:///kv?data=port", "no \\? or # part"),
        ("unix:///kv?data=pigeon", "data= and one of"),
        ("dns:///localhost:7700?data=shared", "unix:///path"),
    ],
)
def test_wrong_forms_say_what_is_right(text: str, says: str) -> None:
    with pytest.raises(UnsupportedURL, match=says):
        connect(text)


def test_settings_belong_to_the_daemon() -> None:
    with pytest.raises(ConfigError, match="dram: the store at unix:///s"):
        connect("unix:///s", dram={"budget_bytes": 1 << 20})


def test_unknown_settings_of_an_embedded_store_name_the_known_ones(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'drum'; known here: .*dram"):
        connect(f"file://{tmp_path}", drum={"budget_bytes": 1})


def test_a_deadline_is_positive() -> None:
    with pytest.raises(InvalidRequest, match="deadline_s must be > 0"):
        connect("unix:///s", deadline_s=0)
