"""Creates a certificate authority for tests, and one certificate that it signs, for Ray, Prefect and MLflow with
TLS.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files, in PEM format."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def ray(self) -> dict[str, str]:
        """The environment of every process of a Ray cluster with TLS."""
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(self.certificate),
            "RAY_TLS_SERVER_KEY": str(self.key),
            "RAY_TLS_CA_CERT": str(self.authority),
        }


def make_certificates(folder: Path, addresses: Sequence[str] = ("127.0.0.1",)) -> Certificates:
    """Write an authority and a certificate for these IP addresses into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _signed("authority", authority_key, None, authority_key, [], is_authority=True)
    signed = _signed("machine", key, authority, authority_key, addresses, is_authority=False)
    found = Certificates(folder / "ca.crt", folder / "machine.crt", folder / "machine.key")
    found.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    found.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    found.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return found


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    addresses: Sequence[str],
    *,
    is_authority: bool,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"rollflow test {name}")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(one)) for one in addresses)]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        # Python 3.13 rejects certificates without the following extensions.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(_allow_use(is_authority), critical=True)
    )
    if not is_authority:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _allow_use(is_authority: bool) -> x509.KeyUsage:
    """Return what the key of a certificate may be used for: an authority signs certificates, a machine messages."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    unused = dict.fromkeys((*others, "decipher_only", "crl_sign"), False)
    return x509.KeyUsage(digital_signature=not is_authority, key_cert_sign=is_authority, **unused)
