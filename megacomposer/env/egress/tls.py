"""Certificates of the egress proxy: an authority of its own, for looking into HTTPS.

The key never leaves this process: neither a file nor the sandbox has it. It vouches only inside
sandboxes that were given `certificate_pem`.
"""

from __future__ import annotations

import datetime
import functools
import ipaddress
import os
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = datetime.timedelta(days=30)
_CLOCK_SKEW = datetime.timedelta(days=1)
_CONTEXTS_KEPT = 256


class CertificateAuthority:
    """Signs certificates for the hosts that a proxy stands in for."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        # One key for all hosts: it lives exactly as long as the authority's.
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign_own()
        self._contexts: dict[str, ssl.SSLContext] = {}

    @property
    def certificate_pem(self) -> str:
        """What a sandbox has to trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")

    def context(self, host: str) -> ssl.SSLContext:
        """A server's TLS settings for `host`, a name or an address. Refuses any other SNI name."""
        context = self._contexts.get(host)
        if context is None:
            context = self._make_context(host)
            if len(self._contexts) >= _CONTEXTS_KEPT:
                del self._contexts[next(iter(self._contexts))]
            self._contexts[host] = context
        return context

    def _make_context(self, host: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])

        def check_name(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> int | None:
            if name is None or name.lower().removesuffix(".") == host:
                return None
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

        context.sni_callback = check_name
        pem = self._sign_leaf(host).public_bytes(serialization.Encoding.PEM)
        pem += self._leaf_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        # The ssl module loads keys from files only; this one is in memory.
        fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
        try:
            os.write(fd, pem)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context

    def _builder(self, subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])])
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _VALID)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )

    def _sign_own(self) -> x509.Certificate:
        public = self._key.public_key()
        builder = self._builder("megacomposer egress proxy", public)
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        return (
            builder.issuer_name(
                x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "megacomposer egress proxy")])
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def _sign_leaf(self, host: str) -> x509.Certificate:
        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        return (
            self._builder(host, self._leaf_key.public_key())
            .issuer_name(self._certificate.subject)
            .add_extension(x509.SubjectAlternativeName([name]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(issuer, critical=False)
            .add_extension(server, critical=False)
            .sign(self._key, hashes.SHA256())
        )


@functools.lru_cache(maxsize=8)
def upstream_context(ca_path: str | None) -> ssl.SSLContext:
    """Verifies servers against the host's trusted roots, and those in the file `ca_path`."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if ca_path:
        context.load_verify_locations(ca_path)
    return context


_ROOTS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")


@functools.lru_cache(maxsize=1)
def host_roots_pem() -> str:
    """The roots that this host trusts, for clients inside whose trust store is replaced."""
    for path in (ssl.get_default_verify_paths().cafile, *_ROOTS):
        if path and os.path.exists(path):
            return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""
