"""The mesh's own certificate authority: creates it, and issues a certificate to each role. Needs the `certs` extra."""

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.services.access.certificates import SERVER_NAME
from penstock.services.access.guard import IDENTITY_PREFIX
from penstock.services.access.roles import CallerRole
from penstock.services.private_files import replace_file

ROLES = tuple(role.value for role in CallerRole if role is not CallerRole.CLIENT)
AUTHORITY_DAYS = 3650
SKEW = datetime.timedelta(minutes=5)
"""Certificates are valid from a little before they are issued, for machines whose clocks are slow."""


class AuthorityError(Exception):
    """The folder has no authority, or already has one, or a file in it cannot be read."""


def create(folder: Path, hosts: Sequence[str], days: int) -> None:
    """Create an authority, and a certificate for each role.

    hosts: names and addresses by which clients reach the routers. days: how long the certificates of the roles are valid.

    Raises:
        AuthorityError: The folder has an authority already.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / "ca.key").exists():
        raise AuthorityError(f"{folder / 'ca.key'}: exists already; `penstock certs rotate` issues new certificates")
    authority, key = _new_authority()
    replace_file(folder / "ca.key", _key_text(key))
    replace_file(folder / "ca.pem", _text(authority), mode=0o644)
    for role in ROLES:
        _issue(folder, role, authority, key, hosts if role == "router" else (), days)


def rotate(folder: Path, days: int, *, authority: bool = False) -> None:
    """Issue a new certificate to each role, with the same names as before.

    authority: also create a new authority. Certificates of the old one stay valid until they expire, so that processes may
        take up the new ones at different times.

    Raises:
        AuthorityError: The folder has no authority, or a file in it cannot be read.
    """
    try:
        trusted = x509.load_pem_x509_certificates((folder / "ca.pem").read_bytes())
        loaded = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        router = x509.load_pem_x509_certificates((folder / "router.pem").read_bytes())[0]
    except OSError as error:
        raise AuthorityError(
            f"{error.filename}: {error.strerror}; `penstock certs init` creates an authority"
        ) from None
    except (ValueError, IndexError) as error:
        raise AuthorityError(f"{folder}: not the folder of an authority: {error}") from None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise AuthorityError(f"{folder / 'ca.key'}: not a key of `penstock certs init`")
    current, key = trusted[0], loaded
    if authority:
        current, key = _new_authority()
        now = datetime.datetime.now(datetime.UTC)
        trusted = [current, *(each for each in trusted if each.not_valid_after_utc > now)]
        # First what is trusted, then what is to be trusted: in between, every certificate is of a known authority.
        replace_file(folder / "ca.pem", b"".join(map(_text, trusted)), mode=0o644)
        replace_file(folder / "ca.key", _key_text(key))
    for role in ROLES:
        _issue(folder, role, current, key, _hosts_of(router) if role == "router" else (), days)


def _new_authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = _name(f"Penstock mesh authority {serial:x}"[:64])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates and lists
    certificate = (
        _unsigned(name, name, key, serial, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, serial: int, days: float
) -> x509.CertificateBuilder:
    """A certificate that is valid from now on, for so many days."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _issue(
    folder: Path,
    role: str,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    hosts: Iterable[str],
    days: float,
) -> None:
    """Write the certificate of a role with a new key."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(SERVER_NAME.format(role=role)), *map(_host_name, hosts)]
    identity = x509.UniformResourceIdentifier(f"{IDENTITY_PREFIX}{role}")
    purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        _unsigned(_name(f"penstock {role}"), authority.subject, key, x509.random_serial_number(), days)
        .add_extension(x509.SubjectAlternativeName([*names, identity]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(purposes, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)  # type: ignore[arg-type]
        .sign(authority_key, hashes.SHA256())
    )
    replace_file(folder / f"{role}.pem", _key_text(key) + _text(certificate))


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names of clients' certificates, without the one of the role."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return [host for host in hosts if host != SERVER_NAME.format(role="router")]


def _text(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())
