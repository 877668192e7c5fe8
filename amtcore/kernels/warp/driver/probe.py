"""The smallest kernel there is, written by hand: tells whether PTX can be loaded and launched."""

from __future__ import annotations

import torch

from amtcore.errors import BackendError
from amtcore.kernels.warp.launching import THREADS, Kernel, Launcher

#: out[k] = x[k] + y[k] for k < n, one number in each thread.
PROBE = Kernel(
    "probe",
    """\
.version 7.0
.target sm_80
.address_size 64

.visible .entry probe(
	.param .u64 probe_param_0,
	.param .u64 probe_param_1,
	.param .u64 probe_param_2,
	.param .u64 probe_param_3
)
{
	.reg .pred %p<2>;
	.reg .b32 %r<4>;
	.reg .f32 %f<4>;
	.reg .b64 %rd<10>;

	ld.param.u64 %rd1, [probe_param_0];
	ld.param.u64 %rd2, [probe_param_1];
	ld.param.u64 %rd3, [probe_param_2];
	ld.param.u64 %rd4, [probe_param_3];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %tid.x;
	mad.lo.s32 %r3, %r1, 32, %r2;
	cvt.u64.u32 %rd5, %r3;
	setp.ge.u64 %p1, %rd5, %rd4;
	@%p1 bra $L_end;
	shl.b64 %rd6, %rd5, 2;
	add.s64 %rd7, %rd1, %rd6;
	add.s64 %rd8, %rd2, %rd6;
	add.s64 %rd9, %rd3, %rd6;
	ld.global.f32 %f1, [%rd7];
	ld.global.f32 %f2, [%rd8];
	add.rn.ftz.f32 %f3, %f1, %f2;
	st.global.f32 [%rd9], %f3;
$L_end:
	ret;
}
""",
)
#: Not a multiple of a warp, so that the last one is cut.
_SIZE = 1000


def probe(launcher: Launcher) -> None:
    """Add two vectors on the device and compare with torch.

    Raises:
        BackendError: What the launch raises, or wrong sums.
    """
    x = torch.arange(_SIZE, dtype=torch.float32, device=launcher.device)
    y = x.flip(0) * 0.3
    out = torch.full((_SIZE + 1,), -1.0, device=launcher.device)
    launcher.launch(PROBE, -(-_SIZE // THREADS), (x, y, out, _SIZE))
    if not torch.equal(out[:-1], x + y) or out[-1] != -1.0:
        raise BackendError(
            f"the {launcher.name} launcher adds wrongly: expected {_SIZE} sums as torch has them; "
            "please report it with the versions of driver and torch"
        )
