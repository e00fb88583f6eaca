"""Signed histories: a subscriber with the public key accepts only versions that the private key has signed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pulse_rl as pulse
from pulse_rl.history.manifest import manifest_name, parse
from pulse_rl.history.operate.verify import verify
from pulse_rl.log.objects import fetch
from pulse_rl.log.sealed import seal
from pulse_rl.log.signing import Keys
from pulse_rl.store.base import Store
from tests.conftest import Trainee
from tests.loco.ranks import Ranks, good
from tests.sync.shares import model, shares

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key()
KEYS = Keys(None, PUBLIC)


def pem(path: Path, key: Any, *, password: bytes | None = None) -> tuple[Path, Path]:
    """A private key and its public one, as files."""
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form = serialization.Encoding.PEM
    (path / "key.pem").write_bytes(key.private_bytes(form, serialization.PrivateFormat.PKCS8, encryption))
    (path / "key.pub.pem").write_bytes(
        key.public_key().public_bytes(form, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return path / "key.pem", path / "key.pub.pem"


def test_a_signed_history_is_followed(store: Store, trainee: Trainee, tmp_path: Path) -> None:
    """With the key and without, from PEM files, over a restart of the publisher; readers need no key."""
    private, public = pem(tmp_path, KEY)
    publisher = pulse.Publisher(store, cast="bfloat16", sign_with=private)
    live, subscriber = trainee.empty(), pulse.Subscriber(store, public_key=public)
    for version in range(6):
        if version == 3:
            publisher = pulse.Publisher(store, cast="bfloat16", sign_with=KEY)
        report = publisher.publish(trainee.step(), version=version)
        assert subscriber.sync(live).digest == report.digest == pulse.digest(live)
    for key in (None, PUBLIC):
        assert pulse.Subscriber(store, public_key=key).sync(trainee.empty()).version == 5
    assert verify(store, public_key=public).ok


@pytest.mark.parametrize("signed_by", [None, OTHER])
def test_another_history_is_refused(store: Store, trainee: Trainee, signed_by: Ed25519PrivateKey | None) -> None:
    trainee.published(store, sign_with=signed_by)
    live = trainee.empty()
    message = "found no signature" if signed_by is None else "not by the key"
    with pytest.raises(pulse.IntegrityError, match=message) as raised:
        pulse.Subscriber(store, public_key=PUBLIC).sync(live)
    assert raised.value.name == manifest_name(0)
    assert pulse.digest(live) == pulse.digest(trainee.empty())
    with pytest.raises(pulse.IntegrityError, match=message):
        pulse.Publisher(store, cast="bfloat16", sign_with=KEY).publish(trainee.step(), version=1)
    # A version that leads past damage would begin another history here, whose readers all stop.
    with pytest.raises(ValueError, match="sign_with: expected the private key of"):
        pulse.Publisher(store, cast="bfloat16", sign_with=KEY).publish(trainee.step(), version=1, anchor=True)
    assert pulse.History(store).sequences() == [0]
    report = verify(store, public_key=PUBLIC)
    assert report.bad_versions == report.good_versions == ()
    assert message in report.problems[0]


def test_every_altered_byte_is_found(trainee: Trainee) -> None:
    """In a signed manifest by the key, in an unsigned one by its own hash."""
    for key in (KEY, None):
        store = pulse.open_store("memory://")
        pulse.Publisher(store, cast="bfloat16", sign_with=key).publish(trainee.step(), version=0)
        data = bytes(store.get(manifest_name(0)))
        keys = KEYS if key else None
        assert parse(data, 0, keys, "it").version == 0
        for at in range(len(data)):
            for bit in (1, 32):
                altered = bytearray(data)
                altered[at] ^= bit
                with pytest.raises(pulse.IntegrityError):
                    parse(bytes(altered), 0, keys, "it")
        for cut in (data[:-1], data[1:], data + b" ", data + b"}", b""):
            with pytest.raises(pulse.IntegrityError):
                parse(cut, 0, keys, "it")


def test_what_somebody_with_the_bucket_can_forge(trainee: Trainee) -> None:
    """A version changed and hashed anew, with the old signature, another's, none, or a second member of that name."""
    store = pulse.open_store("memory://")
    pulse.Publisher(store, cast="bfloat16", sign_with=KEY).publish(trainee.step(), version=0)
    data = bytes(store.get(manifest_name(0)))
    document = json.loads(data)
    signature = document["signature"]
    document["version"] = 7
    del document["blake3"], document["signature"]
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    hashed = body + f',"blake3":"{blake3(body).hexdigest()}"'.encode()
    forged = {
        "none": hashed + b"}",
        "old": hashed + f',"signature":"{signature}"}}'.encode(),
        "other": hashed + f',"signature":"{OTHER.sign(hashed).hex()}"}}'.encode(),
        "twice": data[:-1] + f',"blake3":"{blake3(data[:-1]).hexdigest()}"}}'.encode(),
        "unsealed": seal(parse(data, 0, KEYS, "it"), None),
    }
    for manifest in forged.values():
        store.put(manifest_name(0), manifest)
        with pytest.raises(pulse.IntegrityError, match="sign"):
            pulse.Subscriber(store, public_key=PUBLIC).sync(trainee.empty())


def test_objects_are_bound_by_the_signed_manifest(tmp_path: Path, trainee: Trainee) -> None:
    """A patch that is sound in itself, of a model with the same tensors, in place of the one that was signed."""
    for name in ("ours", "theirs"):
        trainee.published(tmp_path / name, 2, sign_with=KEY)
    ours, theirs = (next((tmp_path / name / "patches").iterdir()) for name in ("ours", "theirs"))
    ours.write_bytes(theirs.read_bytes())
    live = trainee.empty()
    manifest = parse((tmp_path / "ours" / manifest_name(1)).read_bytes(), 1, KEYS, "it")
    with pytest.raises(pulse.IntegrityError, match="is corrupt"):
        pulse.Subscriber(tmp_path / "ours", public_key=PUBLIC).sync(live)
    assert manifest.patch is not None
    with pytest.raises(pulse.IntegrityError) as raised:
        fetch(pulse.open_store(tmp_path / "ours"), manifest.patch, 1 << 20)
    error, size = raised.value, len(theirs.read_bytes())
    assert error.name == manifest.patch.name
    assert (error.expected, error.found) == (
        (manifest.patch.blake3, blake3(theirs.read_bytes()).hexdigest())
        if size == manifest.patch.nbytes
        else (manifest.patch.nbytes, size)
    )
    assert pulse.digest(live) == pulse.digest(trainee.empty())


@pytest.mark.parametrize("key", [None, KEY])
def test_a_history_that_has_gone_back_is_refused(
    tmp_path: Path, trainee: Trainee, key: Ed25519PrivateKey | None
) -> None:
    """Whoever has the bucket cannot sign, but could delete the newest manifests; a cache could be stale."""
    trainee.published(tmp_path, 3, sign_with=key)
    live, subscriber = trainee.empty(), pulse.Subscriber(tmp_path, public_key=PUBLIC if key else None)
    subscriber.sync(live)
    manifest = tmp_path / manifest_name(2)
    data = manifest.read_bytes()
    manifest.unlink()
    with pytest.raises(pulse.IntegrityError, match="gone back"):
        subscriber.sync(live)
    assert subscriber.version == 2
    assert subscriber.verify(live)
    manifest.write_bytes(data)
    assert subscriber.sync(live).route == "none"


def test_what_is_not_a_key(tmp_path: Path, trainee: Trainee) -> None:
    private, public = pem(tmp_path, ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(ValueError, match="key.pem: .*private key"):
        pulse.Publisher("memory://", sign_with=private)
    with pytest.raises(ValueError, match="key.pub.pem: .*public key"):
        pulse.Subscriber("memory://", public_key=public)
    private, public = pem(tmp_path, KEY, password=b"secret")
    with pytest.raises(ValueError, match="without a password"):
        pulse.Publisher("memory://", sign_with=private)
    with pytest.raises(ValueError, match="public key in PEM"):
        pulse.Subscriber("memory://", public_key=private)
    with pytest.raises(FileNotFoundError):
        pulse.Subscriber("memory://", public_key=tmp_path / "nothing.pem")
    with pytest.raises(ValueError, match="Ed25519PrivateKey"):
        pulse.Subscriber("memory://", public_key=KEY)  # type: ignore[arg-type]


def follow_signed(group: Any, rank: int, size: int, store: str, private: Path, public: Path, other: Path) -> Any:
    """Publish two signed versions together, and follow them with the key and with another one."""
    with pulse.Publisher(store, group=group, sign_with=private) as publisher:
        for version in range(2):
            report = publisher.publish(shares(model(version), rank, size), version=version)
    live = [shares({name: torch.zeros_like(t) for name, t in model(0).items()}, rank, size) for _ in range(2)]
    synced = pulse.Subscriber(store, group=group, public_key=public).sync(live[0])
    assert synced.digest == report.digest == pulse.digest(model(1))
    assert held(live[0]) == held(shares(model(1), rank, size))
    with pytest.raises(pulse.PulseError) as raised:
        pulse.Subscriber(store, group=group, public_key=other).sync(live[1])
    assert held(live[1]) == held(shares({name: torch.zeros_like(t) for name, t in model(0).items()}, rank, size))
    return type(raised.value).__name__, str(raised.value)


def held(weights: Any) -> dict[str, list[Any]]:
    return {name: getattr(one, "tensor", one).flatten().tolist() for name, one in weights.items()}


def test_ranks_follow_what_ranks_have_signed(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (private, public), (_, other) = pem(tmp_path, KEY), pem(tmp_path / "other", OTHER)
    store = str(tmp_path / "store")
    (name, text), (_, told) = good(ranks(follow_signed, 2, store, private, public, other))
    assert name == "IntegrityError"
    assert "not by the key" in text
    assert "not by the key" in told
    manifest = parse((tmp_path / "store" / manifest_name(1)).read_bytes(), 1, KEYS, "it")
    assert manifest.patch is not None
    assert manifest.patch.parts == 2
    assert verify(pulse.open_store(store), public_key=public).ok
