"""The broker's second listener, which wants a password over TLS; and what a client needs to say there.

The certificate is made by OpenSSL for the test alone; its key is in the broker's folder and nowhere else.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SECURE = "SECURE"
USER, PASSWORD = "tidegate", "canary-7f3a-of-a-password"


class SecureListener:
    """Where it listens, and both sides' settings."""

    def __init__(self, folder: Path) -> None:
        self.port = 0
        self._certificate = folder / "certificate.pem"
        self._store = folder / "certificate-and-key.pem"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def settings(self) -> dict[str, str]:
        """The broker's."""
        if not self._store.exists():
            self._make()
        prefix, login = f"listener.name.{SECURE.lower()}", "org.apache.kafka.common.security.plain"
        return {
            f"{prefix}.sasl.enabled.mechanisms": "PLAIN",
            f"{prefix}.plain.sasl.jaas.config": f'{login}.PlainLoginModule required user_{USER}="{PASSWORD}";',
            f"{prefix}.ssl.keystore.type": "PEM",
            f"{prefix}.ssl.keystore.location": str(self._store),
            f"{prefix}.ssl.client.auth": "none",
        }

    def client(self, password: str = PASSWORD) -> dict[str, str]:
        """A client's, under Kafka's names."""
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self._certificate),
            "sasl.mechanism": "PLAIN",
            "sasl.username": USER,
            "sasl.password": password,
        }

    def _make(self) -> None:
        key = self._store.with_name("key.pem")
        subprocess.run(
            [
                *[
                    "openssl",
                    "req",
                    "-x509",
                    "-nodes",
                    "-days",
                    "2",
                    "-newkey",
                    "ec",
                    "-pkeyopt",
                    "ec_paramgen_curve:prime256v1",
                ],
                *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", str(key), "-out", str(self._certificate)),
            ],
            check=True,
            capture_output=True,
            timeout=600,
        )
        self._store.write_bytes(key.read_bytes() + self._certificate.read_bytes())
        key.unlink()
