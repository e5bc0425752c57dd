"""Egress policy: which requests may leave a sandbox. Pure decisions, no input or output.

    policy = EgressPolicy(package_index_rules(deny_packages=("my-package",)))
    decision = policy.decide("GET", "pypi.org", 443, "/simple/numpy/")

`EgressProxy` (egress_proxy.py) holds requests to it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import ipaddress
import re
import unicodedata
import urllib.parse
from collections.abc import Iterable, Sequence

from megacomposer.env.task import EgressRule

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Services of cloud hosts that hand out credentials: refused even where `allow_addresses` has them.
_METADATA = {
    ipaddress.ip_address(text)
    for text in ("169.254.169.254", "169.254.170.2", "100.100.100.200", "fd00:ec2::254")
}
# Spelled out: what `ipaddress` calls private differs between Python versions.
_REFUSED = {
    ipaddress.ip_network(text): why
    for text, why in {
        "0.0.0.0/8": "this host",
        "10.0.0.0/8": "private",
        "100.64.0.0/10": "carrier-grade NAT",
        "127.0.0.0/8": "loopback",
        "169.254.0.0/16": "link-local",
        "172.16.0.0/12": "private",
        "192.0.0.0/24": "special purpose",
        "192.0.2.0/24": "documentation",
        "192.88.99.0/24": "6to4 relay",
        "192.168.0.0/16": "private",
        "198.18.0.0/15": "benchmarking",
        "198.51.100.0/24": "documentation",
        "203.0.113.0/24": "documentation",
        "224.0.0.0/4": "multicast",
        "240.0.0.0/4": "reserved",
        "::ffff:0:0/96": "IPv4-mapped",
        "::/96": "loopback, unspecified or IPv4-compatible",
        "64:ff9b::/96": "NAT64",
        "64:ff9b:1::/48": "NAT64",
        "100::/64": "discard-only",
        "2001::/23": "special purpose",
        "2001:db8::/32": "documentation",
        "2002::/16": "6to4",
        "3fff::/20": "documentation",
        "5f00::/16": "segment routing",
        "fc00::/7": "private",
        "fe80::/10": "link-local",
        "fec0::/10": "site-local",
        "ff00::/8": "multicast",
    }.items()
}
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_METHOD = re.compile(r"[A-Z][A-Z-]*")
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_HOSTS_SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The answer to one request or tunnel."""

    allowed: bool
    reason: str = ""
    """Why not, as one word for logs: host, port, method, path, denied_path, ambiguous_path,
    address_spelling."""
    advice: str = ""
    """Why not, as one line that tells an agent what to do."""
    rule: EgressRule | None = None
    """The rule that allows it, or the one that denies its path."""
    inspect: bool = False
    """For a tunnel: each request inside has to be decided, too."""


def rule_name(rule: EgressRule | None) -> str:
    """A rule in one word for logs, such as `pypi.org:443/GET,HEAD`; "" for None."""
    if rule is None:
        return ""
    return f"{rule.host}:{','.join(map(str, rule.ports))}/{','.join(rule.methods)}"


def normalized_host(text: str) -> str:
    """A host name in lower case without its last dot, or an address in its one usual spelling.

    IPv6 may stand in brackets. Raises ValueError for anything that a resolver might read as an
    address although it is not spelled as one (decimal, octal, hexadecimal, short), for zone ids,
    and for what is no host name.
    """
    host = text.lower()
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare:
        try:
            address = ipaddress.IPv6Address(bare)
        except ValueError:
            raise ValueError(f"{text!r} is not an IPv6 address") from None
        if address.scope_id:
            raise ValueError(f"{text!r}: an address with a zone id is not reachable")
        return address.compressed
    host = host.removesuffix(".")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", host.rpartition(".")[2]):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise ValueError(f"{text!r} is an odd spelling of an address") from None
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise ValueError(f"{text!r} is not a host name (names in other scripts: as xn--...)")
    return host


def split_authority(text: str, default_port: int | None) -> tuple[str, int]:
    """`host:port` or `[address]:port` as (normalized host, port). Raises ValueError."""
    match = re.fullmatch(r"(\[[^\[\]]*\]|[^:\[\]@/?#\s]+)(?::([0-9]{1,5}))?", text)
    if not match or (match[2] is None and default_port is None):
        raise ValueError(f"{text!r} is not host:port")
    port = default_port if match[2] is None else int(match[2])
    assert port is not None
    if not 0 < port < 65536:
        raise ValueError(f"{text!r}: no such port")
    return normalized_host(match[1]), port


def _is_opaque(rule: EgressRule) -> bool:
    return "*" in rule.methods and rule.paths == ("*",) and not rule.deny_paths


def _checked(rule: EgressRule, where: str) -> EgressRule:
    """The rule with its host normalized. Raises ValueError naming the field."""
    wildcard = "*." if rule.host.startswith("*.") else ""
    try:
        host = normalized_host(rule.host.removeprefix("*."))
    except ValueError as error:
        raise ValueError(f"{where}.host: {error}; use a name, or *.name") from None
    if wildcard and (":" in host or re.fullmatch(r"[0-9.]+", host)):
        raise ValueError(f"{where}.host: {rule.host!r}: an address cannot have a wildcard")
    if not rule.ports or not all(0 < port < 65536 for port in rule.ports):
        raise ValueError(f"{where}.ports: {rule.ports}: give ports from 1 to 65535")
    if not rule.methods or not all(m == "*" or _METHOD.fullmatch(m) for m in rule.methods):
        raise ValueError(f"{where}.methods: {rule.methods}: give HTTP methods in capitals, or *")
    for field, patterns in (("paths", rule.paths), ("deny_paths", rule.deny_paths)):
        if not all(p.startswith(("/", "*")) for p in patterns):
            raise ValueError(f"{where}.{field}: {patterns}: a pattern begins with / or *")
    if not rule.paths:
        raise ValueError(f"{where}.paths is empty, so that the rule allows nothing; use ('*',)")
    if not all(_HEADER.fullmatch(name.lower()) for name in rule.drop_headers):
        raise ValueError(f"{where}.drop_headers: {rule.drop_headers}: not names of headers")
    drop = tuple(name.lower() for name in rule.drop_headers)
    return dataclasses.replace(rule, host=wildcard + host, drop_headers=drop)


class EgressPolicy:
    """The rules of one task. Nothing else is allowed.

    Rules for one host add up, but a path that one of them denies is denied. `allow_addresses` are
    networks such as "10.1.2.0/24" that may be reached although they are private: internal mirrors.
    Raises ValueError naming the field of a rule that makes no sense.
    """

    def __init__(self, rules: Sequence[EgressRule], *, allow_addresses: Iterable[str] = ()) -> None:
        self.rules = tuple(_checked(rule, f"egress[{i}]") for i, rule in enumerate(rules))
        self._allowed: list[Network] = []
        for text in allow_addresses:
            try:
                self._allowed.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise ValueError(f"allow_addresses: {error}; give a network") from None

    @property
    def inspects(self) -> bool:
        """Some rule needs the inside of a TLS connection."""
        return not all(_is_opaque(rule) for rule in self.rules)

    def connect(self, host: str, port: int) -> Decision:
        """May a tunnel to `host` (normalized) be opened, and must its inside be decided, too?"""
        found = self._rules_for(host, port)
        if isinstance(found, Decision):
            return found
        denies = any(rule.deny_paths for rule in found)
        opaque = next((rule for rule in found if _is_opaque(rule)), None)
        inspect = denies or opaque is None
        return Decision(allowed=True, rule=None if inspect else opaque, inspect=inspect)

    def decide(self, method: str, host: str, port: int, target: str) -> Decision:
        """May this request go out? `target` is the URL's path, as sent; its query is not read."""
        found = self._rules_for(host, port)
        if isinstance(found, Decision):
            return found
        path = canonical_path(target)
        looks = any(rule.deny_paths or rule.paths != ("*",) for rule in found)
        if path is None and looks:
            return Decision(
                allowed=False,
                reason="ambiguous_path",
                advice=f"the path is spelled in an unusual way that is not let through to {host}; "
                "send it without //, /../, ;, backslashes or needless % escapes",
            )
        folded = unicodedata.normalize("NFKC", path or "").casefold()
        for rule in found:
            if any(fnmatch.fnmatchcase(folded, p.casefold()) for p in rule.deny_paths):
                return Decision(
                    allowed=False,
                    rule=rule,
                    reason="denied_path",
                    advice="this resource is withheld from this task on purpose; do without it "
                    "and write the code yourself",
                )
        on_path = [
            rule
            for rule in found
            if rule.paths == ("*",) or any(fnmatch.fnmatchcase(path or "", p) for p in rule.paths)
        ]
        if not on_path:
            paths = " ".join(p for rule in found for p in rule.paths)
            advice = f"on {host} only these paths are allowed: {paths}"
            return Decision(allowed=False, reason="path", advice=advice)
        for rule in on_path:
            if "*" in rule.methods or method in rule.methods:
                return Decision(allowed=True, rule=rule)
        methods = ", ".join(sorted({m for rule in on_path for m in rule.methods}))
        advice = f"on {host} only these methods are allowed here: {methods}"
        return Decision(allowed=False, reason="method", advice=advice)

    def _rules_for(self, host: str, port: int) -> list[EgressRule] | Decision:
        named = [rule for rule in self.rules if _matches(rule.host, host)]
        if not named:
            hosts = list(dict.fromkeys(rule.host for rule in self.rules))
            shown = ", ".join(hosts[:_HOSTS_SHOWN]) + (", ..." if hosts[_HOSTS_SHOWN:] else "")
            advice = f"only these hosts can be reached: {shown}" if hosts else "there is no network"
            advice += "; work with what is installed"
            return Decision(allowed=False, reason="host", advice=advice)
        found = [rule for rule in named if port in rule.ports]
        if not found:
            ports = ", ".join(map(str, sorted({p for rule in named for p in rule.ports})))
            advice = f"on {host} only these ports can be reached: {ports}"
            return Decision(allowed=False, reason="port", advice=advice)
        return found

    def refused_address(self, address: str) -> str:
        """Why a resolved address may not be dialled, in a word or two; "" where it may."""
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return "not an address"
        if ip in _METADATA:
            return "metadata service"
        if any(ip in network for network in self._allowed):
            return ""
        for network, why in _REFUSED.items():
            if ip in network:
                return why
        if getattr(ip, "scope_id", None):
            return "link-local"
        return "" if ip.is_global else "not global"


def _matches(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and len(host) > len(pattern) - 1
    return host == pattern


def canonical_path(target: str) -> str | None:
    """A URL's path, unescaped, without its query; None where servers may read it differently.

    That is: dot segments, empty segments, parameters (`;`), backslashes, control characters,
    escapes of escapes, and what is not UTF-8.
    """
    raw = target.partition("?")[0]
    if not (raw.startswith("/") and raw.isascii()) or re.search(r"%(?![0-9a-fA-F]{2})", raw):
        return None
    try:
        path = urllib.parse.unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        return None
    if re.search(r"//|/\.\.?(/|$)|[\\;%?#\x00-\x1f\x7f]", path):
        return None
    return path


def package_index_rules(
    *,
    deny_packages: Sequence[str] = (),
    index_host: str = "pypi.org",
    files_host: str = "files.pythonhosted.org",
) -> tuple[EgressRule, ...]:
    """Rules to install any Python package but `deny_packages`: the task's own, and its forks.

    Names are compared as PEP 503 does (case, and `-`, `_`, `.`). A file counts as the package's
    where a version follows the name: `my_package-2.0...`, so a package called `my-package-2x`
    is denied with `my-package`. Raises ValueError for what is no package name.
    """
    pages: list[str] = []
    files: list[str] = []
    for name in deny_packages:
        for spelling in _spellings(name):
            pages += [
                f"/{page}/{spelling}{end}" for page in ("simple", "pypi") for end in ("", "/*")
            ]
            files += [f"*/{spelling}-{version}*" for version in ("[0-9]", "v[0-9]")]
            files += [f"/packages/*/?/{spelling}/*"]  # the old layout: .../f/flask/...
    return (
        EgressRule(host=index_host, paths=("/simple/*", "/pypi/*/json"), deny_paths=tuple(pages)),
        EgressRule(host=files_host, paths=("/packages/*",), deny_paths=tuple(files)),
    )


def _spellings(name: str) -> list[str]:
    """Patterns of a name as it may stand in URLs: with one separator, or two, between words."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise ValueError(f"deny_packages: {name!r} is not the name of a package")
    words = re.split(r"[-_.]+", name.lower())
    return list(dict.fromkeys(("[-_.]" * n).join(words) for n in (1, 2)))


def proxy_environment(port: int, ca_path: str) -> dict[str, str]:
    """Variables for commands inside: where the proxy is, and whom to trust.

    `ca_path` is a file inside with `EgressProxy.ca_bundle_pem`; "" where no rule looks into HTTPS.
    """
    url = f"http://127.0.0.1:{port}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    env = dict.fromkeys(names, url)
    env |= dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1")
    if ca_path:
        trust = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS")
        env |= dict.fromkeys((*trust, "CURL_CA_BUNDLE", "GIT_SSL_CAINFO"), ca_path)
    return env
