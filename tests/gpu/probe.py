"""A kernel as its author writes it, for tests of launchers."""

from __future__ import annotations

from amtcore.kernels.gpu.launcher import Kernel

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
