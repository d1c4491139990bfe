"""Keys: made once, read strictly, and named by what is wrong with them."""

import contextlib
import os
import random
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa

from appliance.checkpoint.keyring import Keyring
from appliance.checkpoint.keys import CURVES, generate_key, load_private_key, load_public_key
from appliance.errors import ConfigError

Private = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | dsa.DSAPrivateKey


def write_private(path: Path, key: Private, *, password: bytes | None = None, traditional: bool = False) -> Path:
    form = serialization.PrivateFormat.TraditionalOpenSSL if traditional else serialization.PrivateFormat.PKCS8
    protection = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, protection))
    return path


def write_public(path: Path, key: Private) -> Path:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
    return path


@pytest.fixture(scope="module")
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


class TestGeneration:
    @pytest.mark.parametrize("curve", CURVES)
    def test_what_the_private_key_signs_the_public_key_knows(self, tmp_path: Path, curve: str) -> None:
        made = generate_key(tmp_path / "a.key", curve=curve)
        private, public = load_private_key(tmp_path / "a.key"), load_public_key(tmp_path / "a.pub")
        assert made == private.public == public
        signature = private.sign(b"data")
        assert public.has_signed(b"data", signature=signature)
        assert not public.has_signed(b"date", signature=signature)
        for damaged in (b"", b"x", signature[:-1], signature + b"\0", bytes(len(signature))):
            assert not public.has_signed(b"data", signature=damaged)

    def test_only_the_owner_may_read_the_private_key(self, tmp_path: Path) -> None:
        generate_key(tmp_path / "a.key", public_path=tmp_path / "trust.pub")
        assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "trust.pub").stat().st_mode) == 0o644

    @pytest.mark.parametrize("there", ["a.key", "a.pub"])
    def test_nothing_is_overwritten_and_no_half_pair_is_left(self, tmp_path: Path, there: str) -> None:
        (tmp_path / there).write_text("precious")
        with pytest.raises(ConfigError, match=f"{there} is already there"):
            generate_key(tmp_path / "a.key")
        assert [path.name for path in tmp_path.iterdir()] == [there]
        assert (tmp_path / there).read_text() == "precious"

    def test_a_public_key_that_cannot_be_written_takes_the_private_one_with_it(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot write"):
            generate_key(tmp_path / "a.key", public_path=tmp_path / "none" / "a.pub")
        assert list(tmp_path.iterdir()) == []

    def test_one_name_for_both_and_an_unknown_curve_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="two names"):
            generate_key(tmp_path / "a.pub")
        with pytest.raises(ConfigError, match="P-256, P-384, P-521"):
            generate_key(tmp_path / "a.key", curve="secp256k1")

    def test_openssl_reads_both(self, tmp_path: Path) -> None:
        generate_key(tmp_path / "a.key")
        shown = subprocess.run(
            ["openssl", "pkey", "-in", tmp_path / "a.key", "-pubout"], check=True, capture_output=True
        ).stdout
        assert shown == (tmp_path / "a.pub").read_bytes()


class TestPrivateKeys:
    @pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o601, 0o666, 0o777])
    def test_one_that_lies_open_is_refused_with_the_way_out(self, tmp_path: Path, mode: int) -> None:
        generate_key(tmp_path / "a.key")
        (tmp_path / "a.key").chmod(mode)
        with pytest.raises(ConfigError, match=f"mode {mode:04o}") as caught:
            load_private_key(tmp_path / "a.key")
        assert "chmod 600" in str(caught.value)

    def test_one_that_a_group_may_read_is_accepted(self, tmp_path: Path) -> None:
        generate_key(tmp_path / "a.key")
        for mode in (0o640, 0o400):
            (tmp_path / "a.key").chmod(mode)
            load_private_key(tmp_path / "a.key")

    @pytest.mark.parametrize("traditional", [True, False])
    def test_an_encrypted_one_says_so(self, tmp_path: Path, traditional: bool) -> None:
        path = write_private(
            tmp_path / "a.key", ec.generate_private_key(ec.SECP256R1()), password=b"secret", traditional=traditional
        )
        with pytest.raises(ConfigError, match="is encrypted"):
            load_private_key(path)

    def test_the_traditional_form_with_parameters_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "a.key"
        path.touch(mode=0o600)
        subprocess.run(["openssl", "ecparam", "-name", "secp384r1", "-genkey", "-out", path], check=True)
        assert b"EC PARAMETERS" in path.read_bytes()
        load_private_key(path)

    def test_other_kinds_and_curves_are_named(self, tmp_path: Path, rsa_key: rsa.RSAPrivateKey) -> None:
        others: list[tuple[Private, str]] = [
            (rsa_key, "RSAPrivateKey"),
            (ed25519.Ed25519PrivateKey.generate(), "Ed25519PrivateKey"),
            (ec.generate_private_key(ec.SECP256K1()), "secp256k1"),
        ]
        for number, (key, name) in enumerate(others):
            with pytest.raises(ConfigError, match=f"{name} is not supported"):
                load_private_key(write_private(tmp_path / f"{number}.key", key))

    def test_a_public_key_in_its_place_is_called_one(self, tmp_path: Path) -> None:
        generate_key(tmp_path / "a.key")
        (tmp_path / "a.pub").chmod(0o600)
        with pytest.raises(ConfigError, match="no private key but a PUBLIC KEY"):
            load_private_key(tmp_path / "a.pub")


class TestPublicKeys:
    def test_the_fingerprint_is_the_hash_of_the_pem_text(self, tmp_path: Path) -> None:
        generate_key(tmp_path / "a.key")
        shown = subprocess.run(["sha256sum", tmp_path / "a.pub"], check=True, capture_output=True, text=True).stdout
        assert load_public_key(tmp_path / "a.pub").fingerprint == shown.split()[0]

    def test_text_around_the_block_and_line_ends_do_not_change_it(self, tmp_path: Path) -> None:
        made = generate_key(tmp_path / "a.key")
        text = (tmp_path / "a.pub").read_bytes()
        (tmp_path / "b.pub").write_bytes(b"key of the release team\n" + text.replace(b"\n", b"\r\n"))
        assert load_public_key(tmp_path / "b.pub").fingerprint == made.fingerprint

    def test_a_private_key_in_its_place_is_refused_whatever_its_mode(self, tmp_path: Path) -> None:
        generate_key(tmp_path / "a.key")
        with pytest.raises(ConfigError, match="is a private key") as caught:
            load_public_key(tmp_path / "a.key")
        assert "pubout" in str(caught.value)

    def test_other_kinds_and_curves_are_named(self, tmp_path: Path, rsa_key: rsa.RSAPrivateKey) -> None:
        others: list[tuple[Private, str]] = [
            (rsa_key, "RSAPublicKey"),
            (ed25519.Ed25519PrivateKey.generate(), "Ed25519PublicKey"),
            (ec.generate_private_key(ec.SECP256K1()), "secp256k1"),
        ]
        for number, (key, name) in enumerate(others):
            with pytest.raises(ConfigError, match=f"{name} is not supported"):
                load_public_key(write_public(tmp_path / f"{number}.pub", key))

    def test_a_certificate_two_keys_and_no_pem_are_named(self, tmp_path: Path) -> None:
        generate_key(tmp_path / "a.key")
        key = (tmp_path / "a.pub").read_bytes()
        for data, reason in (
            (b"", "0 PEM blocks"),
            (b"\x00\xff" * 100, "0 PEM blocks"),
            (key + key, "2 PEM blocks"),
            (key.replace(b"PUBLIC KEY", b"CERTIFICATE"), "no public key but a CERTIFICATE"),
            (key.replace(b"PUBLIC KEY", b"RSA PUBLIC KEY"), "no public key but a RSA"),
            (key[:60] + key[-30:], "damaged"),
            (b"x" * 70_000, "larger than"),
        ):
            (tmp_path / "b.pub").write_bytes(data)
            with pytest.raises(ConfigError, match=reason):
                load_public_key(tmp_path / "b.pub")

    def test_what_is_no_file_is_a_config_error_at_once(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", tmp_path / "nul\0"):
            with pytest.raises(ConfigError, match="key "):
                load_public_key(path)

    def test_damaged_files_are_keys_or_config_errors(self, tmp_path: Path) -> None:
        randomness = random.Random(2)
        for name, load in (("a.pub", load_public_key), ("a.key", load_private_key)):
            if not (tmp_path / "a.key").exists():
                generate_key(tmp_path / "a.key")
            good = (tmp_path / name).read_bytes()
            path = tmp_path / "damaged"
            path.touch(mode=0o600)
            for _ in range(400):
                data = bytearray(good)
                for _ in range(randomness.randint(1, 3)):
                    data[randomness.randrange(len(data))] = randomness.choice(
                        [0, 10, 65, 255, randomness.randrange(256)]
                    )
                path.write_bytes(data)
                with contextlib.suppress(ConfigError):
                    load(path)


class TestKeyring:
    def test_directories_give_their_key_files_and_nothing_else(self, tmp_path: Path) -> None:
        first = generate_key(tmp_path / "first.key")
        second = generate_key(tmp_path / "second.key", public_path=tmp_path / "second.pem", curve="P-521")
        (tmp_path / "README").write_text("about these keys")
        (tmp_path / ".hidden.pub").write_text("not a key")
        keyring = Keyring.load([tmp_path])
        assert keyring.keys == (first, second)
        assert keyring.find(second.fingerprint) == second
        assert keyring.find("0" * 64) is None

    def test_one_bad_key_in_a_directory_is_an_error_not_a_gap(self, tmp_path: Path) -> None:
        generate_key(tmp_path / "a.key")
        (tmp_path / "bad.pub").write_text("garbage")
        with pytest.raises(ConfigError, match=r"bad\.pub"):
            Keyring.load([tmp_path])

    def test_the_same_key_twice_counts_once(self, tmp_path: Path) -> None:
        made = generate_key(tmp_path / "a.key")
        (tmp_path / "again.pub").write_bytes((tmp_path / "a.pub").read_bytes())
        assert Keyring.load([tmp_path, tmp_path / "a.pub"]).keys == (made,)

    def test_one_name_for_two_keys_is_refused(self, tmp_path: Path) -> None:
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
            generate_key(tmp_path / folder / "release.key")
        with pytest.raises(ConfigError, match="two keys named 'release'"):
            Keyring.load([tmp_path / "one", tmp_path / "two"])

    def test_no_key_at_all_says_where_it_looked(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=f"no public key found .*{tmp_path}"):
            Keyring.load([tmp_path])
        with pytest.raises(ConfigError, match="nowhere"):
            Keyring.load([])
        with pytest.raises(ConfigError, match="none"):
            Keyring.load([tmp_path / "none"])

    def test_keys_that_everybody_may_write_or_add_are_not_trusted(self, tmp_path: Path) -> None:
        folder = tmp_path / "trust"
        folder.mkdir()
        generate_key(folder / "a.key")
        (folder / "a.pub").chmod(0o666)
        with pytest.raises(ConfigError, match=r"a\.pub: everybody may write it"):
            Keyring.load([folder])
        (folder / "a.pub").chmod(0o664)
        Keyring.load([folder])
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match="everybody may put keys into"):
            Keyring.load([folder])
