"""Certificates and keys: a deployment's own certificate authority, the server's certificate, a key pair per site."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bpfed.errors import UserError
from bpfed.files import write_whole, writing

#: Names of files.
AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"
SERVER, SERVER_KEY = "server.pem", "server.key"
SITE_KEY, SITE_PUBLIC = "site.key", "site.pub"
KEYS = "keys"
#: Days that certificates are good for.
DAYS = 825


def slug(site: str) -> str:
    """A site's name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", site)


def make_server(folder: Path, host: str) -> None:
    """A certificate authority and a certificate for a server at this host (and on loopback); see `Plan.host`."""
    authority = ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bpfed deployment")])
    root = _builder(issuer, issuer, authority.public_key())
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = _usage(key_cert_sign=True, crl_sign=True)
    certificate = root.add_extension(usage, critical=True).sign(authority, hashes.SHA256())
    write_whole(folder / AUTHORITY, certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / AUTHORITY_KEY, authority)

    own = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    names: list[x509.GeneralName] = []
    for name in dict.fromkeys((host, "localhost", "127.0.0.1", "::1")):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            names.append(x509.DNSName(name))
    server = _builder(subject, issuer, own.public_key())
    server = server.add_extension(x509.SubjectAlternativeName(names), critical=False)
    server = server.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    server = server.add_extension(_usage(digital_signature=True), critical=True)
    server = server.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
    )
    server = server.add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    write_whole(folder / SERVER, server.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    _write_private(folder / SERVER_KEY, own)


def make_site(folder: Path, server: Path, site: str) -> None:
    """A key pair for a site, in its folder; the public half also at the server, the authority's certificate here."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_private(folder / SITE_KEY, key, serialization.PrivateFormat.OpenSSH)
    write_whole(folder / SITE_PUBLIC, public + b"\n")
    write_whole(server / KEYS / f"{slug(site)}.pub", public + b"\n")
    write_whole(folder / AUTHORITY, (server / AUTHORITY).read_bytes())


def public_keys(server: Path, sites: Sequence[str]) -> dict[str, bytes]:
    """The public key of each site as Flower knows it, by name; empty where the deployment has no keys."""
    if not (server / KEYS).is_dir():
        return {}
    found = {}
    for site in sites:
        path = server / KEYS / f"{slug(site)}.pub"
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(
                f"The key of site '{site}', '{path}', cannot be read; restore it, or make the deployment again."
            ) from error
        found[site] = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return found


def _builder(subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
    made = made.not_valid_after(now + datetime.timedelta(days=DAYS))
    return made.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _usage(**allowed: bool) -> x509.KeyUsage:
    kinds = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{kind: allowed.get(kind, False) for kind in kinds})


def _write_private(
    path: Path,
    key: ec.EllipticCurvePrivateKey,
    form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
) -> None:
    """Readable by its owner alone from the first byte on."""
    data = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with writing(path), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
