//! The running softmax of one query head.
//!
//! A state is `(max, sum)` over the logits seen so far, in base 2, beside an accumulator of values weighted by
//! `2^(logit - max)`. The empty state is `(-inf, 0)`. States of disjoint token ranges combine; the order is fixed by
//! the caller, so results are reproducible (online softmax, arXiv 1805.02867; split-KV merge, FlashDecoding).

/// Maximum and sum of a set of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct State {
    pub max: f32,
    pub sum: f32,
}

/// What turns an accumulator into an output row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Finish {
    /// Factor of the accumulator; 0 if there was nothing to see.
    pub scale: f32,
    /// log2 of the sum of 2^logit, the sink included.
    pub lse: f32,
}

impl State {
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// A maximum that can be subtracted: -inf - -inf is NaN.
    #[inline(always)]
    pub fn safe_max(max: f32) -> f32 {
        if max == f32::NEG_INFINITY { 0.0 } else { max }
    }

    /// Adds the head's sink, if any, and normalises.
    pub fn finish(self, sink: Option<f32>) -> Finish {
        let max = match sink {
            Some(sink) if sink > self.max => sink,
            _ => self.max,
        };
        let max = Self::safe_max(max);
        let kept = if self.max == f32::NEG_INFINITY { 0.0 } else { (self.max - max).exp2() };
        let mut sum = f64::from(self.sum) * f64::from(kept);
        if let Some(sink) = sink {
            sum += f64::from(sink - max).exp2();
        }
        if sum == 0.0 {
            return Finish { scale: 0.0, lse: f32::NEG_INFINITY };
        }
        Finish { scale: (f64::from(kept) / sum) as f32, lse: (f64::from(max) + sum.log2()) as f32 }
    }
}
