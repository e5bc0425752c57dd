"""Egress policy: what is refused stays refused in whatever spelling."""

from __future__ import annotations

import pytest

from megacomposer.env.egress.policy import (
    EgressPolicy,
    canonical_path,
    normalized_host,
    package_index_rules,
    proxy_environment,
    split_authority,
)
from megacomposer.env.task import EgressRule


def test_without_rules_nothing_is_allowed() -> None:
    policy = EgressPolicy(())
    for decision in (
        policy.connect("pypi.org", 443),
        policy.decide("GET", "pypi.org", 80, "/"),
    ):
        assert not decision.allowed
        assert decision.reason == "host"
        assert "no network" in decision.advice


def test_suffix_rule_does_not_match_a_name_that_only_ends_alike() -> None:
    policy = EgressPolicy([EgressRule(host="*.example.org")])
    assert policy.decide("GET", "a.b.example.org", 443, "/").allowed
    for host in ("example.org", "badexample.org", "example.org.evil.test", ".example.org"):
        assert not policy.decide("GET", host, 443, "/").allowed


def test_port_and_method_hold_and_the_advice_names_what_is_allowed() -> None:
    policy = EgressPolicy([EgressRule(host="a.test")])
    wrong_port = policy.decide("GET", "a.test", 8443, "/")
    assert (wrong_port.reason, "443" in wrong_port.advice) == ("port", True)
    wrong_method = policy.decide("POST", "a.test", 443, "/")
    assert (wrong_method.reason, "GET, HEAD" in wrong_method.advice) == ("method", True)
    assert policy.decide("HEAD", "a.test", 443, "/x?y").allowed


def test_a_path_denied_by_one_rule_is_denied_whatever_another_allows() -> None:
    policy = EgressPolicy(
        [
            EgressRule(host="a.test", methods=("*",)),
            EgressRule(host="*.test", deny_paths=("/secret/*",)),
        ]
    )
    assert policy.decide("POST", "a.test", 443, "/open").allowed
    assert policy.decide("GET", "a.test", 443, "/secret/x").reason == "denied_path"
    assert policy.connect("a.test", 443).inspect, "a blind tunnel would go around the denial"


@pytest.mark.parametrize(
    "target",
    [
        "/SECRET/x",
        "/%73ecret/x",
        "/%2573ecret/x",
        "//secret/x",
        "/a/../secret/x",
        "/a/%2e%2e/secret/x",
        "/./secret/x",
        "/secret;a=1/x",
        "/a\\..\\secret\\x",
        "/secret%2fx",
        "/se\u017fret/x".encode().decode("latin-1"),
        "/%EF%BD%93ecret/x",
        "/open/#/../../secret/x",
        "/open%00/../secret/x",
        "/secret%2",
        "/%ff/secret/x",
        "secret/x",
        "/secret/x?open",
    ],
)
def test_other_spellings_of_a_denied_path_do_not_pass(target: str) -> None:
    policy = EgressPolicy([EgressRule(host="a.test", deny_paths=("/secret/*", "/se?ret/*"))])
    decision = policy.decide("GET", "a.test", 443, target)
    assert not decision.allowed
    assert decision.reason in ("denied_path", "ambiguous_path")


def test_usual_paths_are_not_ambiguous() -> None:
    assert canonical_path("/a%20b/c.d/%E2%82%AC?q=//..") == "/a b/c.d/\u20ac"
    assert canonical_path("/a/..b/...") == "/a/..b/..."


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0x7f.0.0.1",
        "127.1",
        "127.0.0.1.5",
        "1.2.3.0x4",
        "0",
        "[::1%25lo]",
        "[::ffff:127.0.0.1",
        "fe80::1%eth0",
        "127%2e0.0.1",
        "a b",
        "",
        ".",
        "a..b",
        "-a.test",
        "b\u00fccher.test",
        "\uff11\uff12\uff17.0.0.1",
        "user@a.test",
        "a" * 64 + ".test",
    ],
)
def test_odd_spellings_of_hosts_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is no|is an odd|zone id"):
        normalized_host(host)


def test_hosts_are_compared_in_one_spelling() -> None:
    assert normalized_host("PyPI.org.") == "pypi.org"
    assert normalized_host("[2606:4700:0::1]") == "2606:4700::1"
    assert split_authority("[::1]:80", None) == ("::1", 80)
    for bad in ("a.test", "a.test:0", "a.test:99999", "a:b@c.test:1", "a.test:1:2", "a.test:x"):
        with pytest.raises(ValueError, match="."):
            split_authority(bad, None)


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("127.0.0.1", "loopback"),
        ("10.1.2.3", "private"),
        ("172.31.255.255", "private"),
        ("192.168.0.1", "private"),
        ("169.254.169.254", "metadata"),
        ("169.254.1.1", "link-local"),
        ("fd00:ec2::254", "metadata"),
        ("100.64.0.1", "carrier"),
        ("100.100.100.200", "metadata"),
        ("0.0.0.0", "this host"),
        ("0.1.2.3", "this host"),
        ("224.0.0.1", "multicast"),
        ("255.255.255.255", "reserved"),
        ("198.18.0.1", "benchmarking"),
        ("::1", "loopback"),
        ("::", "unspecified"),
        ("::7f00:1", "IPv4-compatible"),
        ("::ffff:169.254.169.254", "IPv4-mapped"),
        ("::ffff:8.8.8.8", "IPv4-mapped"),
        ("64:ff9b::a9fe:a9fe", "NAT64"),
        ("64:ff9b:1::1", "NAT64"),
        ("2002:a9fe:a9fe::1", "6to4"),
        ("2001:0:1::1", "special"),
        ("fc00::1", "private"),
        ("fe80::1", "link-local"),
        ("fe80::1%lo", "link-local"),
        ("ff02::1", "multicast"),
        ("localhost", "not an address"),
    ],
)
def test_addresses_inside_networks_are_refused(address: str, word: str) -> None:
    assert word in EgressPolicy(()).refused_address(address)


def test_public_addresses_pass_and_exceptions_open_only_themselves() -> None:
    policy = EgressPolicy((), allow_addresses=("10.0.5.0/24", "169.254.0.0/16"))
    for address in ("151.101.0.223", "2a04:4e42::223", "10.0.5.9"):
        assert policy.refused_address(address) == ""
    for address in ("10.0.6.1", "169.254.169.254", "::ffff:10.0.5.9"):
        assert policy.refused_address(address) != ""
    with pytest.raises(ValueError, match="allow_addresses"):
        EgressPolicy((), allow_addresses=("10.0.5.9/8",))


def test_an_address_needs_a_rule_of_its_own() -> None:
    policy = EgressPolicy([EgressRule(host="*.test"), EgressRule(host="[2606:4700:0::1]")])
    assert policy.decide("GET", "2606:4700::1", 443, "/").allowed
    assert policy.decide("GET", "1.2.3.4", 443, "/").reason == "host"


@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ("host", EgressRule(host="*")),
        ("host", EgressRule(host="a.*.test")),
        ("host", EgressRule(host="*.1.2.3.4")),
        ("host", EgressRule(host="https://a.test")),
        ("ports", EgressRule(host="a.test", ports=())),
        ("ports", EgressRule(host="a.test", ports=(0,))),
        ("methods", EgressRule(host="a.test", methods=("get",))),
        ("paths", EgressRule(host="a.test", paths=())),
        ("paths", EgressRule(host="a.test", paths=("simple/*",))),
        ("deny_paths", EgressRule(host="a.test", deny_paths=("x",))),
        ("drop_headers", EgressRule(host="a.test", drop_headers=("a b",))),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_by_its_field(field: str, rule: EgressRule) -> None:
    with pytest.raises(ValueError, match=rf"egress\[0\]\.{field}"):
        EgressPolicy([rule])


def test_only_a_rule_without_conditions_gives_a_blind_tunnel() -> None:
    opaque = EgressPolicy([EgressRule(host="a.test", methods=("*",))])
    assert not opaque.inspects
    assert not opaque.connect("a.test", 443).inspect
    for rule in (
        EgressRule(host="a.test"),
        EgressRule(host="a.test", methods=("*",), paths=("/x/*",)),
        EgressRule(host="a.test", methods=("*",), deny_paths=("/x/*",)),
    ):
        policy = EgressPolicy([rule])
        assert policy.inspects
        assert policy.connect("a.test", 443).inspect


INDEX, FILES = "pypi.org", "files.pythonhosted.org"


@pytest.mark.parametrize(
    ("host", "path"),
    [
        (INDEX, "/simple/my-pkg/"),
        (INDEX, "/simple/my-pkg"),
        (INDEX, "/simple/My_Pkg/"),
        (INDEX, "/simple/MY.PKG/"),
        (INDEX, "/simple/my--pkg/"),
        (INDEX, "/simple/my%2Dpkg/"),
        (INDEX, "/simple/x/../my-pkg/"),
        (INDEX, "/simple//my-pkg/"),
        (INDEX, "/pypi/my-pkg/json"),
        (INDEX, "/pypi/my_pkg/1.0/json"),
        (INDEX, "/project/my-pkg/"),
        (FILES, "/packages/aa/bb/cc/my_pkg-1.0-py3-none-any.whl"),
        (FILES, "/packages/aa/bb/cc/my_pkg-1.0-py3-none-any.whl.metadata"),
        (FILES, "/packages/aa/bb/cc/My.Pkg-1.0.tar.gz"),
        (FILES, "/packages/aa/bb/cc/my-pkg-1.0.zip"),
        (FILES, "/packages/aa/bb/cc/my-pkg-v1.0.tar.gz"),
        (FILES, "/packages/aa/bb/cc/my__pkg-1.0.tar.gz"),
        (FILES, "/packages/aa/bb/cc/my%5fpkg-1.0.tar.gz"),
        (FILES, "/packages/source/m/my-pkg/anything.tar.gz"),
        (FILES, "/packages/2.7/m/My_Pkg/My_Pkg-1.0-py2.7.egg"),
        (FILES, "/packages/aa/bb/cc/pkgfork-1.0.tar.gz"),
    ],
)
def test_the_tasks_own_package_cannot_be_fetched(host: str, path: str) -> None:
    policy = EgressPolicy(package_index_rules(deny_packages=("My.pkg", "pkgfork")))
    assert not policy.decide("GET", host, 443, path).allowed


@pytest.mark.parametrize(
    ("host", "path"),
    [
        (INDEX, "/simple/numpy/"),
        (INDEX, "/simple/my-pkg-plugin/"),
        (INDEX, "/simple/my/"),
        (INDEX, "/pypi/numpy/json"),
        (FILES, "/packages/aa/bb/cc/numpy-2.0-cp311-cp311-manylinux_2_17_x86_64.whl"),
        (FILES, "/packages/aa/bb/cc/my-pkg-plugin-1.0.tar.gz"),
        (FILES, "/packages/aa/bb/cc/my_pkg_plugin-1.0-py3-none-any.whl"),
        (FILES, "/packages/aa/bb/cc/notmy_pkg-1.0-py3-none-any.whl"),
        (FILES, "/packages/source/n/numpy/numpy-1.0.tar.gz"),
    ],
)
def test_other_packages_can_be_fetched(host: str, path: str) -> None:
    policy = EgressPolicy(package_index_rules(deny_packages=("my-pkg",)))
    assert policy.decide("GET", host, 443, path).allowed


def test_a_denied_name_that_is_a_word_of_the_url_does_not_block_the_index() -> None:
    policy = EgressPolicy(package_index_rules(deny_packages=("simple", "packages", "source")))
    assert policy.decide("GET", INDEX, 443, "/simple/numpy/").allowed
    assert policy.decide("GET", FILES, 443, "/packages/source/n/numpy/numpy-1.0.tar.gz").allowed
    assert not policy.decide("GET", INDEX, 443, "/simple/simple/").allowed
    with pytest.raises(ValueError, match="deny_packages"):
        package_index_rules(deny_packages=("../x",))


def test_clients_are_told_of_the_proxy_and_its_authority() -> None:
    env = proxy_environment(3128, "/tmp/ca.pem")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        assert env[name] == "http://127.0.0.1:3128"
    for name in (
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "PIP_CERT",
        "NODE_EXTRA_CA_CERTS",
        "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO",
    ):
        assert env[name] == "/tmp/ca.pem"
    assert "SSL_CERT_FILE" not in proxy_environment(3128, "")
