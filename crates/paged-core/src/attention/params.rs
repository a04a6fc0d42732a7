//! What an attention launch computes, apart from the arrays.

use super::array::Array;
use super::element::read_scalar;
use super::math::LOG2_E;
use crate::error::{Error, Result};

/// Options of an attention launch.
#[derive(Debug)]
pub struct AttentionParams<'a> {
    /// Factor of q . k.
    pub sm_scale: f32,
    /// `cap` of `cap * tanh(logit / cap)`, finite; 0 is off.
    pub logits_soft_cap: f32,
    /// Virtual logits `[num_qo_heads]`, natural units, that take part in the softmax with no value; f32 or 16 bits.
    pub sinks: Option<Array<'a, 1>>,
    /// Tokens that a query sees, itself included; 1 or more.
    pub window: Option<usize>,
}

impl AttentionParams<'_> {
    /// Plain attention with the given factor of q . k.
    pub fn new(sm_scale: f32) -> Self {
        Self { sm_scale, logits_soft_cap: 0.0, sinks: None, window: None }
    }

    /// Checks the options for `num_qo_heads` heads.
    ///
    /// # Errors
    /// `InvalidArgument` naming the option.
    pub(crate) fn resolve(&self, num_qo_heads: usize) -> Result<Softmax> {
        if !self.sm_scale.is_finite() {
            return Err(Error::invalid("sm_scale", format!("{}, expected a finite number", self.sm_scale)));
        }
        if !(self.logits_soft_cap.is_finite() && self.logits_soft_cap >= 0.0) {
            let found = self.logits_soft_cap;
            return Err(Error::invalid(
                "logits_soft_cap",
                format!("{found}, expected 0 (off) or a positive number"),
            ));
        }
        if self.window == Some(0) {
            return Err(Error::invalid("window", "0 tokens, expected 1 or more, or none"));
        }
        let sinks = match &self.sinks {
            None => None,
            Some(sinks) => {
                sinks.expect_shape([num_qo_heads], "[num_qo_heads]")?;
                Some(Sinks {
                    data: sinks.data(),
                    stride_bytes: sinks.stride_bytes(0),
                    element: sinks.element_type(),
                })
            }
        };
        let capped = self.logits_soft_cap > 0.0;
        Ok(Softmax {
            q_scale: if capped { self.sm_scale / self.logits_soft_cap } else { self.sm_scale * LOG2_E },
            cap: capped.then_some(self.logits_soft_cap * LOG2_E),
            sinks,
            window: self.window.unwrap_or(usize::MAX),
        })
    }
}

/// The options in the form that kernels use: logits in base 2.
#[derive(Clone, Copy)]
pub(crate) struct Softmax {
    /// Factor of q; what is left to do to a logit is `cap * tanh(logit)` or nothing.
    pub q_scale: f32,
    pub cap: Option<f32>,
    sinks: Option<Sinks>,
    /// Visible tokens.
    pub window: usize,
}

#[derive(Clone, Copy)]
struct Sinks {
    data: *const u8,
    stride_bytes: isize,
    element: super::element::ElementType,
}

// SAFETY: only read, and borrowed for the launch.
unsafe impl Send for Sinks {}
// SAFETY: as above.
unsafe impl Sync for Sinks {}

impl Softmax {
    /// The sink of a head in base 2, `None` without sinks.
    ///
    /// # Safety
    /// `head < num_qo_heads` of the launch.
    #[inline(always)]
    pub unsafe fn sink(&self, head: usize) -> Option<f32> {
        // SAFETY: the array has num_qo_heads elements.
        self.sinks.map(|sinks| unsafe {
            read_scalar(sinks.element, sinks.data.offset(head as isize * sinks.stride_bytes)) * LOG2_E
        })
    }
}
