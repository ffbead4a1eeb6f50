"""Certificates and keys: a deployment's own certificate authority, the server's certificate, a key pair per site."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bpfed._util.errors import UserError
from bpfed._util.files import write_whole, writing
from bpfed.deploy.logs import warn

#: Names of files.
AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"
SERVER, SERVER_KEY = "server.pem", "server.key"
SITE_KEY, SITE_PUBLIC = "site.key", "site.pub"
KEYS = "keys"
#: Days that certificates are good for.
DAYS = 825
#: Days before their end from which on this is said.
WARNING = 30


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
    """The public key of each site as Flower knows it, by name; without those sites whose key was taken out."""
    found = {}
    for site in sites:
        path = server / KEYS / f"{slug(site)}.pub"
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise UserError(
                f"The key of site '{site}', '{path}', cannot be read; restore it, or remove the file to shut the site "
                "out."
            ) from error
        found[site] = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return found


def register(state: Any, keys: Mapping[str, bytes], say: Callable[[str], None]) -> None:
    """Let in exactly these keys, whatever the SuperLink's database has.

    Args:
        state: The database, as Flower's ``LinkState``.
        keys: The public key of each site, by name.
        say: Called with a sentence on whatever was not as it should be.
    """
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.supercore.constant import NodeStatus
    from flwr.supercore.state.schema.linkstate_models import Node
    from sqlalchemy import update

    found = {bytes(node.public_key): node for node in state.get_node_info()}
    for key, node in found.items():
        if key not in keys.values() and node.status != NodeStatus.UNREGISTERED:
            state.delete_node(owner_aid=node.owner_aid, node_id=node.node_id)
            warn(say, f"Node {node.node_id} was registered with a key that is not in '{KEYS}'; it is unregistered now.")
    for site, key in keys.items():
        if key not in found:
            if not state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL):
                raise UserError(f"The key of site '{site}' could not be registered; start the server again.")
        elif found[key].status == NodeStatus.UNREGISTERED:
            # Flower registers no key twice, so its row is made valid again.
            with state.session() as session:
                valid = {"status": NodeStatus.REGISTERED, "unregistered_at": None, "online_until": None}
                session.execute(update(Node).where(Node.public_key == key).values(**valid))
            warn(say, f"Site '{site}' was unregistered, though its key is in '{KEYS}'; it is registered again.")


def check_dates(folder: Path, say: Callable[[str], None], names: Sequence[str] = (AUTHORITY, SERVER)) -> None:
    """See that the certificates in a folder are good today, and say so while there is time to make new ones.

    Raises:
        UserError: One cannot be read, has expired, or is not good yet.
    """
    now = datetime.datetime.now(datetime.UTC)
    for name in names:
        try:
            found = x509.load_pem_x509_certificate((folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"The certificate '{folder / name}' cannot be read; restore it.") from error
        until = found.not_valid_after_utc
        if now > until:
            raise UserError(
                f"The certificate '{folder / name}' expired on {until:%Y-%m-%d}; make the deployment again with 'bpfed "
                "deploy init', and bring its new files to server and sites."
            )
        if now < found.not_valid_before_utc:
            raise UserError(
                f"The certificate '{folder / name}' is good only from {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; "
                "set the clock of this machine."
            )
        if (days := (until - now).days) < WARNING:
            warn(
                say,
                f"The certificate '{folder / name}' expires on {until:%Y-%m-%d}, in {days} days; make the deployment "
                "again before then.",
            )


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
