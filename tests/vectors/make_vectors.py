"""Fixed vectors for block keys, layout digests, frames and transfer digests, computed from the protocol's text alone.

usage: make_vectors.py vectors.json      (needs: pip install blake3==1.0.11 crc32c==2.9.post0)
"""

import base64
import importlib.metadata
import json
import struct
import sys

import crc32c
from blake3 import blake3

DTYPES = {"f32": 0, "f16": 1, "bf16": 2}
KINDS = {"open": 1, "layout": 2, "data": 3, "commit": 4, "abort": 5, "credit": 6, "receipt": 7}


def layout_digest(layout):
    h = blake3(b"pd-bridge/layout/v1" + struct.pack("<II", layout["block_tokens"], len(layout["layers"])))
    for layer in layout["layers"]:
        h.update(struct.pack("<BIIB", 0, layer["n_kv_heads"], layer["head_dim"], DTYPES[layer["dtype"]]))
    return h.digest()


def le32(ids):
    return struct.pack(f"<{len(ids)}I", *ids)


def block_keys(fingerprint, layout, tokens, block_tokens):
    key = blake3(b"pd-bridge/block/v1" + fingerprint + layout).digest()
    keys = [key]
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        key = blake3(key + le32(tokens[start:start + block_tokens])).digest()
        keys.append(key)
    return keys


def header(f, payload):
    return (b"PDBR" + struct.pack("<HH", 1, KINDS[f["kind"]]) + bytes.fromhex(f["transfer_id"])
            + struct.pack("<QHHIIQI", f["seq"], f["layer"], f["part"], f["token_start"], f["token_count"],
                          len(payload), crc32c.crc32c(payload)))


def transfer_digest(frames):
    h = blake3(b"pd-bridge/transfer/v1")
    for layer, part, start, count, payload in sorted(frames):
        h.update(struct.pack("<HHII", layer, part, start, count) + blake3(payload).digest())
    return h.digest()


def payload(seed, length):
    """Bytes that any language can make: the high byte of a 32-bit linear congruential generator."""
    out, x = bytearray(), seed
    for _ in range(length):
        x = (x * 1664525 + 1013904223) & 0xFFFFFFFF
        out.append(x >> 24)
    return bytes(out)


def layout(n, heads, dim, dtype, block):
    return {"block_tokens": block, "layers": [{"kind": "full", "n_kv_heads": heads, "head_dim": dim, "dtype": dtype}] * n}


def main(out):
    layouts = [layout(30, 3, 64, "f16", 256), layout(30, 3, 64, "f32", 256), layout(1, 1, 1, "bf16", 1),
               layout(80, 8, 128, "bf16", 8192)]
    layouts.append({"block_tokens": 16, "layers": layout(1, 2, 8, "f16", 16)["layers"] + layout(1, 4, 16, "f32", 16)["layers"]})
    fingerprint = blake3(b"a model").digest()
    keys = []
    for block, n in ((4, 11), (256, 600), (1, 3), (16, 15)):
        tokens = [(i * 2654435761) % 49152 for i in range(n)]
        root, *chain = block_keys(fingerprint, layout_digest(layouts[0]), tokens, block)
        keys.append({"fingerprint": fingerprint.hex(), "layout_digest": layout_digest(layouts[0]).hex(),
                     "block_tokens": block, "tokens_base64": base64.b64encode(le32(tokens)).decode(),
                     "root": root.hex(), "keys": [k.hex() for k in chain],
                     "tokens_digest": blake3(b"pd-bridge/tokens/v1" + le32(tokens)).hexdigest()})
    frames = []
    for kind, seq, layer, part, start, count, length in (
            ("open", 0, 0, 0, 0, 0, 300), ("data", 1, 0, 0, 0, 4, 64), ("data", 2**63 + 5, 29, 1, 4294967040, 255, 1),
            ("commit", 2, 0, 0, 0, 0, 17), ("abort", 3, 0, 0, 0, 0, 0), ("credit", 0, 0, 0, 0, 0, 8),
            ("receipt", 1, 0, 0, 0, 0, 70_000), ("layout", 9, 0, 0, 0, 0, 2)):
        f = {"kind": kind, "transfer_id": payload(seq & 0xFF, 16).hex(), "seq": seq, "layer": layer, "part": part,
             "token_start": start, "token_count": count, "payload_seed": length, "payload_bytes": length}
        head = header(f, payload(length, length))
        assert len(head) == 56
        frames.append(f | {"header": head.hex()})
    sent = [(1, 1, 4, 4, 7, 100), (0, 0, 0, 4, 8, 64), (0, 1, 0, 4, 9, 64), (0, 0, 4, 3, 10, 48), (300, 0, 70_000, 1, 11, 5)]
    transfer = {"frames": [dict(zip(("layer", "part", "token_start", "token_count", "payload_seed", "payload_bytes"), f)) for f in sent],
                "digest": transfer_digest([(*f[:4], payload(*f[4:])) for f in sent]).hex(),
                "empty_digest": transfer_digest([]).hex()}
    version = importlib.metadata.version
    json.dump({"made_by": {"command": "python make_vectors.py vectors.json", "python": sys.version.split()[0],
                           "blake3": version("blake3"), "crc32c": version("crc32c")},
               "payload_rule": "x = seed; repeat: x = (x * 1664525 + 1013904223) mod 2^32; byte = x >> 24",
               "crc32c_check": {"text": "123456789", "crc32c": crc32c.crc32c(b"123456789")},
               "layouts": [{"layout": lay, "digest": layout_digest(lay).hex()} for lay in layouts],
               "block_keys": keys, "frames": frames, "transfer": transfer}, open(out, "w"), indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
