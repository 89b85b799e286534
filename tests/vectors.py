"""Numbers that nanochat itself produced on a small model with synthetic weights, float32 on CPU.

Head is commit 92d63d4 (July 2026), recipe 4 is 324e69c (March 2026). The model is `config()` filled by
`fill(name, shape)`. Losses and norms are good to 1e-5, single entries after an optimiser step to 5e-5 (the first steps
of AdamW are nearly sign updates, so tiny gradients move them).
"""

from __future__ import annotations

import zlib

import numpy as np

from nanochat_lib.sizing import GPTConfig

AMPLITUDES = {
    "wte": 0.8,
    "value_embeds": 0.2,
    "lm_head": 0.05,
    "attn.c_q": 0.2,
    "attn.c_k": 0.2,
    "attn.c_v": 0.2,
    "attn.c_proj": 0.1,
    "mlp.c_fc": 0.15,
    "mlp.c_proj": 0.1,
    "ve_gate": 0.3,
    "smear_gate": 0.3,
}


def config(recipe: str = "head") -> GPTConfig:
    """Head size 16, windows 128, 128, 128, 256, value embeddings in layers 1 and 3."""
    return GPTConfig(
        sequence_len=256, vocab_size=300, n_layer=4, n_head=4, n_kv_head=2, n_embd=64, window_pattern="SSSL",
        recipe=recipe,
    )  # fmt: skip


def fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 weights of the parameter `name`: a formula for the scalars, else uniform, seeded by the name."""
    if name == "resid_lambdas":
        return np.float32(1.1 - 0.05 * np.arange(shape[0]))
    if name == "x0_lambdas":
        return np.float32(0.2 - 0.04 * np.arange(shape[0]))
    if name == "smear_lambda":
        return np.float32([0.35])
    if name == "backout_lambda":
        return np.float32([0.25])
    (a,) = [a for key, a in AMPLITUDES.items() if key in name]
    random = np.random.RandomState(zlib.crc32(name.encode()))
    return random.uniform(-a, a, size=int(np.prod(shape))).astype(np.float32).reshape(shape)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), int32 (2, 200): longer than the short window; the first five targets are ignored."""
    b, t = np.arange(2)[:, None], np.arange(200)[None, :]
    inputs = (37 * b + 13 * t + (t * t % 11)) % 300
    targets = (7 * inputs + 3) % 300
    targets[0, :5] = -1
    return inputs.astype(np.int32), targets.astype(np.int32)


# (row, position): first four logits, argmax
LOGITS = {
    "head": {
        (0, 0): ((-0.0280322, 0.3938011, -0.2182310, -0.2777477), 248),
        (0, 1): ((-0.0876364, -0.1123750, 0.1045804, 0.4268000), 101),
        (0, 150): ((0.0639857, 0.5660792, 0.1931675, 0.0731865), 155),
        (1, 199): ((-0.0675994, 0.2922799, 0.2773640, -0.1294203), 34),
    },
    "recipe4": {
        (0, 0): ((-0.0267312, 0.3816780, -0.1868164, -0.2868164), 248),
        (0, 1): ((-0.1187829, -0.2183218, 0.1494689, 0.4353077), 101),
        (0, 150): ((0.0134486, 0.5810921, 0.1672539, 0.1319695), 155),
        (1, 199): ((-0.0562716, 0.2351066, 0.3619810, -0.1652128), 34),
    },
}
LOGIT_SUM = {"head": 130.547035, "recipe4": 102.098061}
LOGIT_ABS_SUM = {"head": 22145.578566, "recipe4": 22173.044878}
MEAN_LOSS = {"head": 5.75739765, "recipe4": 5.76145649}
LOSS_SUM = {"head": 2274.172098, "recipe4": 2275.775584}
FIRST_LOSSES = {"head": (5.543342, 5.590124), "recipe4": (5.608372, 5.569099)}  # positions 5 and 6 of row 0

GREEDY = (  # prompt, its twelve greedily generated ids (head)
    ((5, 17, 200), (121, 223, 204, 273, 209, 175, 68, 22, 114, 197, 223, 130)),
    (
        tuple((37 * i + 11) % 300 for i in range(190)),
        (253, 253, 288, 44, 130, 197, 223, 204, 273, 209, 175, 68),
    ),
)

PARAMETER_GROUPS = {
    "head": {
        "wte": 20480, "value_embeds": 20480, "lm_head": 20480, "transformer_matrices": 180272, "scalars": 34,
        "total": 241746,
    },
    "recipe4": {
        "wte": 20480, "value_embeds": 20480, "lm_head": 20480, "transformer_matrices": 180352, "scalars": 8,
        "total": 241800,
    },
}  # fmt: skip
FLOPS_PER_TOKEN = {"head": 1696176, "recipe4": 1696512}

# L2 norm of the mean loss's gradient: head, recipe 4 (None: recipe 4 has no such parameter)
GRADIENT_NORMS = {
    "resid_lambdas": (1.19447833e-02, 8.31213541e-03),
    "x0_lambdas": (2.34302603e-03, 3.13900030e-03),
    "smear_lambda": (3.48734716e-03, None),
    "backout_lambda": (1.00502670e-02, None),
    "transformer.wte.weight": (3.89238941e-02, 3.88516440e-02),
    "transformer.h.0.attn.c_q.weight": (1.09139575e-02, 6.93800750e-03),
    "transformer.h.0.attn.c_k.weight": (1.04029472e-02, 6.60471852e-03),
    "transformer.h.0.attn.c_v.weight": (9.90080066e-03, 7.27847158e-03),
    "transformer.h.0.attn.c_proj.weight": (2.10017071e-02, 1.56331983e-02),
    "transformer.h.0.mlp.c_fc.weight": (7.31114106e-02, 7.57864020e-02),
    "transformer.h.0.mlp.c_proj.weight": (9.07133578e-02, 9.31958683e-02),
    "transformer.h.1.attn.c_q.weight": (8.76343912e-03, 5.48662271e-03),
    "transformer.h.1.attn.c_k.weight": (9.04358929e-03, 5.53193921e-03),
    "transformer.h.1.attn.c_v.weight": (9.98116840e-03, 7.97353495e-03),
    "transformer.h.1.attn.c_proj.weight": (1.88449774e-02, 1.51231192e-02),
    "transformer.h.1.attn.ve_gate.weight": (2.80892151e-04, 2.42186821e-04),
    "transformer.h.1.mlp.c_fc.weight": (6.36582693e-02, 6.59744023e-02),
    "transformer.h.1.mlp.c_proj.weight": (7.70746762e-02, 7.92515377e-02),
    "transformer.h.2.attn.c_q.weight": (8.38232592e-03, 5.22494698e-03),
    "transformer.h.2.attn.c_k.weight": (8.46845237e-03, 5.09131236e-03),
    "transformer.h.2.attn.c_v.weight": (9.11367436e-03, 7.51949689e-03),
    "transformer.h.2.attn.c_proj.weight": (1.73812009e-02, 1.35120628e-02),
    "transformer.h.2.mlp.c_fc.weight": (6.09994824e-02, 6.35116310e-02),
    "transformer.h.2.mlp.c_proj.weight": (7.45937111e-02, 7.65607231e-02),
    "transformer.h.3.attn.c_q.weight": (1.07543979e-02, 5.26096717e-03),
    "transformer.h.3.attn.c_k.weight": (1.03989976e-02, 5.21215651e-03),
    "transformer.h.3.attn.c_v.weight": (1.20418998e-02, 7.63302665e-03),
    "transformer.h.3.attn.c_proj.weight": (2.28033089e-02, 1.48250758e-02),
    "transformer.h.3.attn.ve_gate.weight": (3.81696109e-04, 2.04470410e-04),
    "transformer.h.3.mlp.c_fc.weight": (7.78437952e-02, 6.22217111e-02),
    "transformer.h.3.mlp.c_proj.weight": (9.57319873e-02, 7.65497469e-02),
    "lm_head.weight": (5.65985091e-01, 5.73894127e-01),
    "smear_gate.weight": (3.23112194e-03, None),
    "value_embeds.1.weight": (1.58461818e-03, 8.18266813e-04),
    "value_embeds.3.weight": (1.56008412e-03, 7.32100003e-04),
}

# Three optimiser steps on the batch above, without schedules: embedding_lr 0.3, matrix_lr 0.02, scalar_lr 0.5,
# Muon momentum 0.95; head with unembedding_lr 0.008 and weight_decay 0.28, recipe 4 with 0.004 and 0.2. Losses stand
# before each step and after the last. Recipe 4 orthogonalises in bfloat16: 1e-3 from the second loss on.
STEP_LOSSES = {
    "head": (5.75739765, 4.45099497, 3.20071006, 1.93008959),
    "recipe4": (5.76145649, 4.29694557, 3.51780558, 2.84612131),
}

# Head: (L2 norm, first entry, second entry) before, after 1, after 2, after 3 steps
STEPS = {
    "resid_lambdas": (
        (2.0530465, 1.1000000, 1.0500000), (2.0476811, 1.0947250, 1.0547374),
        (2.0512126, 1.0983193, 1.0583695), (2.0557263, 1.1010530, 1.0615013),
    ),
    "x0_lambdas": (
        (0.2939388, 0.2000000, 0.1600000), (0.8284925, -0.3000000, -0.3399999),
        (0.9386641, 0.0550189, 0.0151613), (1.3729056, 0.3574817, 0.3174732),
    ),
    "smear_lambda": (
        (0.3500000, 0.3500000), (0.5500000, 0.5500000),
        (0.3992940, 0.3992940), (0.2231849, 0.2231849),
    ),
    "backout_lambda": (
        (0.2500000, 0.2500000), (0.4500000, 0.4500000),
        (0.6109018, 0.6109018), (0.6369178, 0.6369178),
    ),
    "transformer.wte.weight": (
        (66.0656380, -0.4797321, -0.4893004), (139.4152184, -1.5184587, -1.5280207),
        (199.6395606, -2.3563187, -2.5663204), (247.4360363, -2.9019258, -2.1956081),
    ),
    "transformer.h.0.attn.c_q.weight": (
        (7.3822854, 0.0226705, -0.0031253), (7.3625153, 0.0233157, -0.0002467),
        (7.3471665, 0.0263697, -0.0012415), (7.3358707, 0.0281151, -0.0023712),
    ),
    "transformer.h.0.attn.c_k.weight": (
        (5.2048703, 0.0476379, 0.0322849), (5.1916154, 0.0505956, 0.0362482),
        (5.1798759, 0.0485605, 0.0364569), (5.1682622, 0.0472690, 0.0372675),
    ),
    "transformer.h.0.attn.c_v.weight": (
        (5.2441376, 0.1346890, 0.0196398), (5.2360823, 0.1278363, 0.0231683),
        (5.2166430, 0.1236146, 0.0260646), (5.1994469, 0.1177965, 0.0286220),
    ),
    "transformer.h.0.attn.c_proj.weight": (
        (3.6788694, -0.0764373, 0.0320671), (3.6715251, -0.0769560, 0.0331031),
        (3.6636847, -0.0735427, 0.0362458), (3.6590928, -0.0716117, 0.0368939),
    ),
    "transformer.h.0.mlp.c_fc.weight": (
        (11.1002562, 0.1221776, 0.0344189), (11.0459098, 0.1230675, 0.0358998),
        (10.9775368, 0.1205923, 0.0387203), (10.9407777, 0.1211166, 0.0407766),
    ),
    "transformer.h.0.mlp.c_proj.weight": (
        (7.3903509, -0.0607085, -0.0060993), (7.3722677, -0.0591447, -0.0083859),
        (7.3514236, -0.0578368, -0.0079426), (7.3394216, -0.0556824, -0.0071027),
    ),
    "transformer.h.1.attn.c_q.weight": (
        (7.4446797, -0.1575031, 0.1305973), (7.4252696, -0.1553074, 0.1325998),
        (7.4071692, -0.1541496, 0.1344548), (7.3928857, -0.1513864, 0.1365216),
    ),
    "transformer.h.1.attn.c_k.weight": (
        (5.2066181, -0.0991629, -0.0496303), (5.1909499, -0.0965361, -0.0484852),
        (5.1793495, -0.0949387, -0.0512953), (5.1672634, -0.0920482, -0.0526579),
    ),
    "transformer.h.1.attn.c_v.weight": (
        (5.2849838, -0.0906019, 0.0393393), (5.2757072, -0.0856206, 0.0388841),
        (5.2619791, -0.0843452, 0.0364664), (5.2486838, -0.0814233, 0.0326864),
    ),
    "transformer.h.1.attn.c_proj.weight": (
        (3.6875314, -0.0703705, -0.0707385), (3.6834574, -0.0675409, -0.0676630),
        (3.6721593, -0.0683237, -0.0689622), (3.6620654, -0.0666866, -0.0680181),
    ),
    "transformer.h.1.attn.ve_gate.weight": (
        (0.6699808, -0.0295401, 0.0393835), (0.6763458, -0.0213743, 0.0474179),
        (0.6758056, -0.0216652, 0.0516167), (0.6730447, -0.0230811, 0.0564492),
    ),
    "transformer.h.1.mlp.c_fc.weight": (
        (11.1275574, 0.0071724, 0.0994671), (11.0626902, 0.0052620, 0.1014864),
        (10.9897012, 0.0058403, 0.1035690), (10.9480553, 0.0073154, 0.1049306),
    ),
    "transformer.h.1.mlp.c_proj.weight": (
        (7.4163497, -0.0459998, -0.0463122), (7.3964631, -0.0488548, -0.0468651),
        (7.3730876, -0.0499292, -0.0482330), (7.3565024, -0.0520220, -0.0479121),
    ),
    "transformer.h.2.attn.c_q.weight": (
        (7.4265554, -0.1687147, -0.1650343), (7.4115939, -0.1669899, -0.1635024),
        (7.3925715, -0.1691179, -0.1673769), (7.3748094, -0.1716985, -0.1730714),
    ),
    "transformer.h.2.attn.c_k.weight": (
        (5.2100643, -0.0674902, -0.1033316), (5.1976624, -0.0700309, -0.1065746),
        (5.1878966, -0.0733265, -0.1067034), (5.1798517, -0.0751453, -0.1051142),
    ),
    "transformer.h.2.attn.c_v.weight": (
        (5.2957960, -0.1168061, -0.0238627), (5.2798393, -0.1171215, -0.0165292),
        (5.2617295, -0.1193200, -0.0172295), (5.2441520, -0.1183876, -0.0151572),
    ),
    "transformer.h.2.attn.c_proj.weight": (
        (3.6688658, 0.0454330, -0.0583673), (3.6594109, 0.0441537, -0.0576486),
        (3.6524315, 0.0438889, -0.0544328), (3.6472220, 0.0441377, -0.0481852),
    ),
    "transformer.h.2.mlp.c_fc.weight": (
        (11.0609420, -0.1081901, -0.1475600), (11.0059172, -0.1043196, -0.1434247),
        (10.9448137, -0.1005597, -0.1368577), (10.8993447, -0.0964974, -0.1337812),
    ),
    "transformer.h.2.mlp.c_proj.weight": (
        (7.4015475, -0.0699768, 0.0065233), (7.3838180, -0.0714922, 0.0077245),
        (7.3612964, -0.0707551, 0.0082695), (7.3425880, -0.0709869, 0.0086762),
    ),
    "transformer.h.3.attn.c_q.weight": (
        (7.3248518, -0.1491373, -0.0375106), (7.3080684, -0.1462507, -0.0335422),
        (7.2947465, -0.1431935, -0.0317075), (7.2793657, -0.1413249, -0.0304381),
    ),
    "transformer.h.3.attn.c_k.weight": (
        (5.3129222, -0.0171258, 0.1199133), (5.3001636, -0.0151577, 0.1173148),
        (5.2903642, -0.0161829, 0.1178987), (5.2789012, -0.0222634, 0.1168700),
    ),
    "transformer.h.3.attn.c_v.weight": (
        (5.2670821, 0.0008896, -0.0157615), (5.2555805, 0.0009522, -0.0109225),
        (5.2269189, -0.0015201, -0.0110033), (5.1959787, -0.0030354, -0.0133294),
    ),
    "transformer.h.3.attn.c_proj.weight": (
        (3.7168064, 0.0879479, -0.0321631), (3.7121555, 0.0866838, -0.0306728),
        (3.6896315, 0.0868280, -0.0322804), (3.6662376, 0.0862621, -0.0326350),
    ),
    "transformer.h.3.attn.ve_gate.weight": (
        (0.8676508, 0.2970800, 0.1470608), (0.8703884, 0.3046359, 0.1544287),
        (0.8718493, 0.3016541, 0.1546318), (0.8714432, 0.3072260, 0.1679955),
    ),
    "transformer.h.3.mlp.c_fc.weight": (
        (11.0566298, 0.0427919, 0.0568916), (11.0037652, 0.0457886, 0.0559020),
        (10.9052354, 0.0475922, 0.0530173), (10.8177644, 0.0479856, 0.0498241),
    ),
    "transformer.h.3.mlp.c_proj.weight": (
        (7.3951905, -0.0848558, 0.0199472), (7.3778771, -0.0864744, 0.0185048),
        (7.3415778, -0.0878167, 0.0197390), (7.3089654, -0.0888043, 0.0217792),
    ),
    "lm_head.weight": (
        (4.1537893, 0.0361150, 0.0310814), (5.5107168, 0.0083922, 0.0033600),
        (7.7052256, -0.0190039, -0.0239692), (10.0292641, -0.0202197, -0.0292717),
    ),
    "smear_gate.weight": (
        (0.7881238, -0.2258876, 0.2176170), (1.2689425, -0.0258876, 0.0176170),
        (1.4801024, -0.1071966, 0.1346299), (1.6203034, 0.0067451, 0.2592711),
    ),
    "value_embeds.1.weight": (
        (11.6804365, 0.0517337, 0.0334794), (44.8903295, -0.4681489, 0.5528954),
        (60.8468505, -0.3199896, 0.9660598), (74.0733072, -0.4319040, 0.9885142),
    ),
    "value_embeds.3.weight": (
        (11.6673538, 0.1138791, -0.0524780), (44.5936462, 0.6329008, -0.5718177),
        (59.6389773, 0.2879061, -0.4769404), (69.1491704, 0.4089511, -0.7745576),
    ),
}  # fmt: skip
