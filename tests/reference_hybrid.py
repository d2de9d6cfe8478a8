"""qwen3moe, qwen35, qwen35moe and qwen3next in plain NumPy float64, one token at a time, from a GGUF file.

Shares no arithmetic with jaxserve: only the file reader, and gguf-py's dequantisation.

    model = Hybrid(path)
    logits, state = model.forward(tokens)              # [n, V] float64; state: one entry per layer
    logits, state = model.forward(more_tokens, state)  # goes on from there, the given state is left as it is
"""

from pathlib import Path

import gguf
import numpy as np

from jaxserve.gguf.reader import open_gguf

DATA = Path(__file__).parent / "data"
ARCHITECTURES = ("qwen3moe", "qwen35", "qwen35moe", "qwen3next")
MIN_WEIGHT_SUM = 2.0**-14


def sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x):
    return x * sigmoid(x)


def rms(x, gain, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def l2(x, eps):
    return x / np.maximum(np.sqrt(np.sum(x * x, axis=-1, keepdims=True)), eps)


def softmax(x):
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


class Hybrid:
    """One file's weights, dequantised, and the forward pass over them."""

    def __init__(self, path):
        file = open_gguf(path)
        self.architecture = file.metadata["general.architecture"]
        assert self.architecture in ARCHITECTURES, self.architecture
        self.metadata = file.metadata
        self.tensors = {
            name: gguf.quants.dequantize(tensor.raw, tensor.type).astype(np.float64).reshape(tensor.shape)
            for name, tensor in file.tensors.items()
        }
        self.layers = self.key("block_count") - self.key("nextn_predict_layers", 0)
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        self.heads = self.key("attention.head_count")
        self.kv_heads = self.key("attention.head_count_kv", self.heads)
        self.head_dim = self.key("attention.key_length")
        self.rope_dims = self.key("rope.dimension_count", self.head_dim)
        assert self.key("rope.scaling.type", "none") == "none", "rope scaling is not part of this reference"

    def key(self, name, *default):
        name = f"{self.architecture}.{name}"
        return self.metadata.get(name, *default) if default else self.metadata[name]

    def forward(self, tokens, state=None):
        """Logits [n, V] after each token; per layer (k, v) or (conv tail, S [Hv, Dk, Dv]) after the last."""
        state = list(state) if state is not None else [self.empty(i) for i in range(self.layers)]
        logits = []
        for token in tokens:
            x = self.tensors["token_embd.weight"][token]
            for i in range(self.layers):
                w = self.layer(i)
                mixer = self.delta if self.is_recurrent(i) else self.attention
                h, state[i] = mixer(w, rms(x, w["attn_norm.weight"], self.eps), state[i])
                x = x + h
                norm = w["ffn_norm.weight"] if "ffn_norm.weight" in w else w["post_attention_norm.weight"]
                x = x + self.ffn(w, rms(x, norm, self.eps))
            head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
            logits.append(head @ rms(x, self.tensors["output_norm.weight"], self.eps))
        return np.array(logits), state

    def layer(self, i):
        """The layer's tensors by their name within it."""
        prefix = f"blk.{i}."
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}

    def is_recurrent(self, i):
        if self.architecture == "qwen3moe":
            return False
        mask = self.key("attention.recurrent_layers", None)
        return bool(mask[i]) if mask is not None else (i + 1) % self.key("full_attention_interval", 4) != 0

    def empty(self, i):
        if not self.is_recurrent(i):
            return np.zeros((0, self.kv_heads, self.head_dim)), np.zeros((0, self.kv_heads, self.head_dim))
        key_heads, value_heads, key_dim, value_dim = self.delta_sizes()
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        tail = np.zeros((self.key("ssm.conv_kernel") - 1, channels))
        return tail, np.zeros((value_heads, key_dim, value_dim))

    # Attention: q and its output gate lie head by head in attn_q where the model has gates.

    def attention(self, w, h, state):
        keys, values = state
        if "attn_qkv.weight" in w:
            kv_rows = self.kv_heads * self.head_dim
            q, k, v = np.split(w["attn_qkv.weight"] @ h, [-2 * kv_rows, -kv_rows])
        else:
            q, k, v = (w[f"attn_{name}.weight"] @ h for name in "qkv")
        q = q.reshape(self.heads, -1)
        q, gate = q[:, : self.head_dim], q[:, self.head_dim :]
        k, v = k.reshape(self.kv_heads, -1), v.reshape(self.kv_heads, -1)
        position = len(keys)
        q = self.rotate(rms(q, w["attn_q_norm.weight"], self.eps), position)
        k = self.rotate(rms(k, w["attn_k_norm.weight"], self.eps), position)
        keys, values = np.concatenate([keys, k[None]]), np.concatenate([values, v[None]])
        out = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            p = softmax(keys[:, group] @ q[head] / np.sqrt(self.head_dim))
            out.append(p @ values[:, group])
        out = np.array(out)
        if gate.size:
            out = out * sigmoid(gate)
        return w["attn_output.weight"] @ out.ravel(), (keys, values)

    def rotate(self, x, position):
        half = self.rope_dims // 2
        frequencies = self.key("rope.freq_base", 10000.0) ** (-np.arange(half) / half)
        theta = position * frequencies * self.rotates(half)
        a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
        cos, sin = np.cos(theta), np.sin(theta)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=1)

    def rotates(self, half):
        """1 where a pair follows a text position; a pair of the fourth stream stays at position 0."""
        sections = self.key("rope.dimension_sections", None)
        if sections is None or self.architecture == "qwen3next":
            return np.ones(half)
        time, height, width, _ = (int(n) for n in sections)
        sector = np.arange(half) % int(sum(sections))
        limit = 3 * np.array([time, height, width])
        return (sector < limit[sector % 3]).astype(float)

    # Gated delta net: the recurrence as it is defined, S [Hv, Dk, Dv].

    def delta_sizes(self):
        key_heads, value_heads = self.key("ssm.group_count"), self.key("ssm.time_step_rank")
        return key_heads, value_heads, self.key("ssm.state_size"), self.key("ssm.inner_size") // value_heads

    def delta(self, w, h, state):
        tail, memory = state
        key_heads, value_heads, key_dim, value_dim = self.delta_sizes()
        u, z, b, a = self.delta_inputs(w, h)
        beta = sigmoid(b)
        decay = np.exp(w["ssm_a"] * np.logaddexp(0.0, a + w["ssm_dt.bias"]))
        window = np.concatenate([tail, u[None]])
        convolved = silu(np.sum(w["ssm_conv1d.weight"].T * window, axis=0))
        q, k, v = np.split(convolved, [key_heads * key_dim, 2 * key_heads * key_dim])
        q = l2(q.reshape(key_heads, key_dim), self.eps) / np.sqrt(key_dim)
        k = l2(k.reshape(key_heads, key_dim), self.eps)
        v = v.reshape(value_heads, value_dim)
        memory = memory * decay[:, None, None]
        out = np.empty((value_heads, value_dim))
        for head in range(value_heads):
            ratio = value_heads // key_heads
            source = head // ratio if self.architecture == "qwen3next" else head % key_heads
            error = v[head] - memory[head].T @ k[source]
            memory[head] += np.outer(k[source], beta[head] * error)
            out[head] = memory[head].T @ q[source]
        out = rms(out, w["ssm_norm.weight"], self.eps) * silu(z.reshape(value_heads, value_dim))
        return w["ssm_out.weight"] @ out.ravel(), (window[1:], memory)

    def delta_inputs(self, w, h):
        """Raw q|k|v channels, z, b, a of one token, from whichever tensors the file has."""
        key_heads, value_heads, key_dim, value_dim = self.delta_sizes()
        ratio = value_heads // key_heads
        if "ssm_in.weight" in w:
            fused = (w["ssm_in.weight"] @ h).reshape(key_heads, -1)
            q, k, v, z = np.split(fused, np.cumsum([key_dim, key_dim, ratio * value_dim]), axis=1)
            u, z = np.concatenate([q.ravel(), k.ravel(), v.ravel()]), z.ravel()
        else:
            u, z = w["attn_qkv.weight"] @ h, w["attn_gate.weight"] @ h
        if "ssm_ba.weight" in w:
            fused = (w["ssm_ba.weight"] @ h).reshape(key_heads, 2, ratio)
            return u, z, fused[:, 0].ravel(), fused[:, 1].ravel()
        return u, z, w["ssm_beta.weight"] @ h, w["ssm_alpha.weight"] @ h

    # Feed-forward: dense, or routed experts with an optional shared one.

    def ffn(self, w, h):
        if "ffn_gate_inp.weight" not in w:
            return w["ffn_down.weight"] @ (silu(w["ffn_gate.weight"] @ h) * (w["ffn_up.weight"] @ h))
        p = softmax(w["ffn_gate_inp.weight"] @ h)
        chosen = np.argsort(-p, kind="stable")[: self.key("expert_used_count")]
        total = max(p[chosen].sum(), MIN_WEIGHT_SUM)
        out = np.zeros_like(h)
        for expert in chosen:
            if "ffn_gate_up_exps.weight" in w:
                gate, up = np.split(w["ffn_gate_up_exps.weight"][expert] @ h, 2)
            else:
                gate, up = w["ffn_gate_exps.weight"][expert] @ h, w["ffn_up_exps.weight"][expert] @ h
            out += p[expert] / total * (w["ffn_down_exps.weight"][expert] @ (silu(gate) * up))
        if "ffn_gate_inp_shexp.weight" not in w:
            return out
        shared = silu(w["ffn_gate_shexp.weight"] @ h) * (w["ffn_up_shexp.weight"] @ h)
        gate = sigmoid(w["ffn_gate_inp_shexp.weight"].ravel() @ h)
        return out + gate * (w["ffn_down_shexp.weight"] @ shared)


def write_qwen3next(path: str | Path, legacy: bool) -> Path:
    """A small random F32 qwen3next file: 2 key and 4 value heads, grouped; a shared expert; a tied head.

    legacy: q, k, v and z of the delta layers in one `ssm_in`, grouped by key head, instead of `attn_qkv` and
    `attn_gate`. Both variants hold the same weights.
    """
    embed, layers, heads, kv_heads, head_dim = 48, 4, 4, 2, 16
    key_heads, value_heads, key_dim, value_dim, width = 2, 4, 16, 16, 4
    experts, used, expert_ffn, shared_ffn = 6, 2, 24, 40
    ratio = value_heads // key_heads
    alphabet = byte_alphabet()
    tokens = [*alphabet, "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    rng = np.random.default_rng(20)

    def matrix(*shape):
        return rng.normal(size=shape).astype(np.float32) / np.float32(np.sqrt(shape[-1]))

    def gain(size):
        return (1 + 0.1 * rng.normal(size=size)).astype(np.float32)

    writer = gguf.GGUFWriter(path, "qwen3next")
    writer.add_name("tiny-qwen3next")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(embed)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(head_dim // 4)
    writer.add_ssm_conv_kernel(width)
    writer.add_ssm_state_size(key_dim)
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(value_heads * value_dim)
    writer.add_full_attention_interval(4)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(used)
    writer.add_expert_feed_forward_length(expert_ffn)
    writer.add_expert_shared_feed_forward_length(shared_ffn)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(alphabet) + [gguf.TokenType.CONTROL] * 3)
    writer.add_token_merges([f"{alphabet[ord('t')]} {alphabet[ord('h')]}"])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)

    writer.add_tensor("token_embd.weight", matrix(len(tokens), embed))
    writer.add_tensor("output_norm.weight", gain(embed))
    for i in range(layers):
        put = lambda name, array, i=i: writer.add_tensor(f"blk.{i}.{name}", array)  # noqa: E731
        put("attn_norm.weight", gain(embed))
        put("post_attention_norm.weight", gain(embed))
        if i % 4 == 3:
            put("attn_q.weight", matrix(2 * heads * head_dim, embed))
            put("attn_k.weight", matrix(kv_heads * head_dim, embed))
            put("attn_v.weight", matrix(kv_heads * head_dim, embed))
            put("attn_q_norm.weight", gain(head_dim))
            put("attn_k_norm.weight", gain(head_dim))
            put("attn_output.weight", matrix(embed, heads * head_dim))
        else:
            q, k = (matrix(key_heads, key_dim, embed) for _ in "qk")
            v, z = (matrix(key_heads, ratio * value_dim, embed) for _ in "vz")
            if legacy:
                put("ssm_in.weight", np.concatenate([q, k, v, z], axis=1).reshape(-1, embed))
            else:
                put("attn_qkv.weight", np.concatenate([x.reshape(-1, embed) for x in (q, k, v)]))
                put("attn_gate.weight", z.reshape(-1, embed))
            put("ssm_ba.weight", matrix(2 * value_heads, embed))
            put("ssm_a", -rng.uniform(0.1, 2.0, size=value_heads).astype(np.float32))
            put("ssm_dt.bias", rng.normal(size=value_heads).astype(np.float32))
            put("ssm_conv1d.weight", matrix(2 * key_heads * key_dim + value_heads * value_dim, width))
            put("ssm_norm.weight", gain(value_dim))
            put("ssm_out.weight", matrix(embed, value_heads * value_dim))
        put("ffn_gate_inp.weight", 4 * matrix(experts, embed))
        put("ffn_gate_exps.weight", matrix(experts, expert_ffn, embed))
        put("ffn_up_exps.weight", matrix(experts, expert_ffn, embed))
        put("ffn_down_exps.weight", matrix(experts, embed, expert_ffn))
        put("ffn_gate_inp_shexp.weight", matrix(embed))
        put("ffn_gate_shexp.weight", matrix(shared_ffn, embed))
        put("ffn_up_shexp.weight", matrix(shared_ffn, embed))
        put("ffn_down_shexp.weight", matrix(embed, shared_ffn))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable}
    character |= {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return [character[byte] for byte in range(256)]


# -- a long prompt: a minute in NumPy, so its logits are kept under tests/data

LONG_MODEL = "qwen35-256-q4_k_m"
LONG_REFERENCE = DATA / "long_hybrid.npz"


def long_prompt() -> np.ndarray:
    """8,192 random tokens."""
    return np.random.default_rng(0).integers(0, 384, size=8192)


def write_long_reference() -> None:
    """Keep the logits of the last 16 positions up to 256, 1,024, 4,096 and 8,192 tokens."""
    logits, _ = Hybrid(DATA / "tiny" / f"{LONG_MODEL}.gguf").forward(long_prompt())
    positions = np.concatenate([np.arange(end - 16, end) for end in (256, 1024, 4096, 8192)])
    np.savez_compressed(LONG_REFERENCE, positions=positions, logits=logits[positions].astype(np.float32))


if __name__ == "__main__":
    write_long_reference()
