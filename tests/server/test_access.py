"""Who may call: TLS, mTLS and bearer tokens, with real certificates."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from embedserve.client import TLS, Client, ServiceError
from embedserve.loadtest.servers import ServerProcess
from embedserve.proto import admin_pb2, admin_pb2_grpc

TOKENS = ("first-token-of-two", "second-token-of-two")


class Authority:
    """A certificate authority that signs for this test."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(name, self.key, ca=True)
        self.pem = self.certificate.public_bytes(serialization.Encoding.PEM)
        (folder / f"{name}.pem").write_bytes(self.pem)

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self.name)])
        builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
            now + datetime.timedelta(hours=1)
        )
        builder = builder.add_extension(x509.BasicConstraints(ca, None), critical=True)
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        return builder.add_extension(names, critical=False).sign(self.key, hashes.SHA256())

    def issue(self, name: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        cert, key_file = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        cert.write_bytes(self._sign(name, key, ca=False).public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert, key_file


def code_of(client: Client) -> grpc.StatusCode:
    with pytest.raises(ServiceError) as caught:
        client.lookup("items", [1], timeout_s=3)
    return caught.value.code


def test_tls_and_mtls(catalog_root, tmp_path):
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    cert, key = authority.issue("server")
    flags = ("--tls-cert", str(cert), "--tls-key", str(key))
    with ServerProcess(catalog_root, *flags) as server:
        with Client(server.address, tls=TLS(authority.pem)) as client:
            assert client.lookup("items", [1]).values.shape == (1, 24)
        for wrong in (TLS(stranger.pem), None):
            with Client(server.address, tls=wrong) as client:
                assert code_of(client) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    pairs = {
        who: tuple(f.read_bytes() for f in a.issue(f"client-of-{who}"))
        for who, a in (("friend", authority), ("foe", stranger))
    }
    with ServerProcess(catalog_root, *flags, "--tls-client-ca", str(tmp_path / "authority.pem")) as server:
        with Client(server.address, tls=TLS(authority.pem, *pairs["friend"])) as client:
            assert client.lookup("items", [1]).values.shape == (1, 24)
        for wrong in (TLS(authority.pem), TLS(authority.pem, *pairs["foe"])):
            with Client(server.address, tls=wrong) as client:
                assert code_of(client) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def test_bearer_tokens_and_separate_ones_for_admin(catalog_root, tmp_path):
    (tmp_path / "tokens").write_text("# two callers\n" + "\n".join(TOKENS) + "\n")
    (tmp_path / "admin").write_text("the-token-of-admins\n")
    flags = ("--auth-tokens", str(tmp_path / "tokens"), "--admin-tokens", str(tmp_path / "admin"))
    with ServerProcess(catalog_root, *flags) as server:
        for token in TOKENS:
            with Client(server.address, token=token) as client:
                assert client.lookup("items", [1]).values.shape == (1, 24)
                assert len(list(client.lookup_stream("items", [[1], [2]]))) == 2
        for wrong in (None, "", "first-token-of-tw", "first-token-of-twoo", "the-token-of-admins", "# two callers"):
            with Client(server.address, token=wrong) as client:
                assert code_of(client) is grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(ServiceError, match="UNAUTHENTICATED"):
                    list(client.lookup_stream("items", [[1]]))
        with grpc.insecure_channel(server.admin_address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            asked = admin_pb2.ListTablesRequest()
            assert stub.ListTables(asked, metadata=(("authorization", "Bearer the-token-of-admins"),)).tables
            for metadata in (
                (),
                (("authorization", f"Bearer {TOKENS[0]}"),),
                (("authorization", "Basic the-token-of-admins"),),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    stub.ListTables(asked, metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "text,words",
    [("", "no token"), ("# only a comment\n", "no token"), ("short\n", "shorter than"), ("é" * 20, "cannot read")],
)
def test_a_token_file_that_admits_nobody_or_anybody_is_refused(tmp_path, text, words):
    from embedserve.quant.errors import ConfigError
    from embedserve.server.auth import TokenAuth

    (tmp_path / "tokens").write_text(text)
    with pytest.raises(ConfigError, match=words):
        TokenAuth(tmp_path / "tokens")
