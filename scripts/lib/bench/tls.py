"""Certificates for a measurement, made by openssl."""

from emulated.basics import run

_DAYS = "2"


def flags(folder, who):
    """What `who` is told, of files that `write_files` makes there."""
    files = {"--tls-cert": f"{who}.pem", "--tls-key": f"{who}.key", "--tls-ca": "ca.pem"}
    return tuple(word for flag, name in files.items() for word in (flag, str(folder / name)))


def write_files(folder):
    """A CA, and a certificate it signed for either side, which both are on this machine."""
    _key(folder, "ca")
    _openssl("req", "-x509", "-new", "-key", folder / "ca.key", "-days", _DAYS, "-subj", "/CN=ca", "-out", folder / "ca.pem")
    for who in ("source", "receiver"):
        _key(folder, who)
        _openssl("req", "-new", "-key", folder / f"{who}.key", "-subj", f"/CN={who}", "-out", folder / f"{who}.csr")
        names = folder / f"{who}.ext"
        names.write_text("subjectAltName=IP:127.0.0.1\n")
        signer = ("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial", "-days", _DAYS)
        wanted = ("-in", folder / f"{who}.csr", "-extfile", names, "-out", folder / f"{who}.pem")
        _openssl("x509", "-req", *signer, *wanted)


def _key(folder, name):
    path = folder / f"{name}.key"
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)
    path.chmod(0o600)


def _openssl(*words):
    run("making certificates", ["openssl", *map(str, words)])
