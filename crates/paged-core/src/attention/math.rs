//! Vector functions of the softmax, accurate to a few units in the last place.
//!
//! The polynomials are least-squares fits made for this file: 2^f on [-1/2, 1/2] with relative error 2e-9 and
//! tanh(x)/x on [-0.7, 0.7] with relative error 2e-8, before rounding.

use super::simd::Simd;

/// log2(e): logits are scaled by it once, and the whole softmax runs in base 2.
pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// 2^x for x <= 127; 0 below about -126.5 and for -inf, 1 exactly at 0, NaN for NaN.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    const C: [f32; 6] = [
        std::f32::consts::LN_2,
        0.240_226_48,
        0.055_503_324,
        0.009_618_437,
        0.001_339_887_5,
        0.000_153_533_59,
    ];
    // `max` gives its second operand for NaN.
    let x = s.max(s.splat(-127.0), x);
    let n = s.round(x);
    let f = s.sub(x, n);
    let mut p = s.splat(C[5]);
    p = s.fma(p, f, s.splat(C[4]));
    p = s.fma(p, f, s.splat(C[3]));
    p = s.fma(p, f, s.splat(C[2]));
    p = s.fma(p, f, s.splat(C[1]));
    p = s.fma(p, f, s.splat(C[0]));
    p = s.fma(p, f, s.splat(1.0));
    s.scale_by_power(p, n)
}

/// tanh(x); NaN for NaN.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    const C: [f32; 5] = [-0.333_331_9, 0.133_291_11, -0.053_558_856, 0.020_091_957, -0.005_138_651];
    let zero = s.splat(0.0);
    let square = s.mul(x, x);
    let mut p = s.splat(C[4]);
    p = s.fma(p, square, s.splat(C[3]));
    p = s.fma(p, square, s.splat(C[2]));
    p = s.fma(p, square, s.splat(C[1]));
    p = s.fma(p, square, s.splat(C[0]));
    let near = s.fma(s.mul(p, square), x, x);
    // 1 - 2 / (e^2x + 1) loses nothing once the result is far from 0; it is 1 in f32 from x = 10 on.
    let bounded = s.max(s.splat(-20.0), x);
    let bounded = s.sub(zero, s.max(s.splat(-20.0), s.sub(zero, bounded)));
    let e = exp2(s, s.mul(bounded, s.splat(2.0 * LOG2_E)));
    let far = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(e, s.splat(1.0))));
    s.select_lt(square, s.splat(0.45), near, far)
}
