//! The CPU attention kernel for Python. Every array goes through the buffer protocol, nothing is copied, and the interpreter
//! is released while a kernel runs.

use paged_core::Error;
use paged_core::attention::{
    self, AttentionArguments, AttentionParams, DecodeBatch, Executor, NewTokens, PagedSequence, PoolLayout,
};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::array::ArrayArgument;
use crate::buffer::{count, int32_array, optional_count};
use crate::errors::CoreResult;
use crate::plan::DecodePlan;

type Argument<'a, 'py> = &'a Bound<'py, PyAny>;
type Optional<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

fn float(argument: &'static str, value: Argument<'_, '_>) -> CoreResult<f32> {
    let number: f64 = value
        .extract()
        .map_err(|_| Error::invalid_type(argument, format!("expected a float, got {}", value.get_type())))?;
    Ok(number as f32)
}

fn pool_layout(value: Argument<'_, '_>) -> CoreResult<PoolLayout> {
    match value.extract::<&str>() {
        Ok("NHD") => Ok(PoolLayout::Nhd),
        Ok("HND") => Ok(PoolLayout::Hnd),
        Ok(other) => {
            Err(Error::invalid("layout", format!("expected \"NHD\" or \"HND\", got {other:?}")).into())
        }
        Err(_) => {
            Err(Error::invalid_type("layout", format!("expected a str, got {}", value.get_type())).into())
        }
    }
}

fn decode_plan<'a, 'py>(value: &'a Bound<'py, PyAny>) -> CoreResult<&'a Bound<'py, DecodePlan>> {
    value.cast::<DecodePlan>().map_err(|_| {
        Error::invalid_type("plan", format!("expected a DecodePlan, got {}", value.get_type())).into()
    })
}

/// The buffers of K and V of new tokens: both or neither.
struct NewBuffers {
    k: ArrayArgument,
    v: ArrayArgument,
}

impl NewBuffers {
    fn both(k: Argument<'_, '_>, v: Argument<'_, '_>) -> CoreResult<Self> {
        Ok(Self { k: ArrayArgument::new("k_new", k)?, v: ArrayArgument::new("v_new", v)? })
    }

    fn optional(k: Optional<'_, '_>, v: Optional<'_, '_>) -> CoreResult<Option<Self>> {
        match (k, v) {
            (Some(k), Some(v)) => Self::both(k, v).map(Some),
            (None, None) => Ok(None),
            (Some(_), None) => Err(Error::invalid("v_new", "missing, but k_new is given").into()),
            (None, Some(_)) => Err(Error::invalid("k_new", "missing, but v_new is given").into()),
        }
    }

    fn tokens(&self) -> CoreResult<NewTokens<'_>> {
        Ok(NewTokens { k: self.k.array()?, v: self.v.array()? })
    }
}

/// The buffers of a launch.
struct Buffers {
    q: ArrayArgument,
    out: ArrayArgument,
    k_pages: ArrayArgument,
    v_pages: ArrayArgument,
    lse: Option<ArrayArgument>,
    new: Option<NewBuffers>,
    sinks: Option<ArrayArgument>,
}

impl Buffers {
    fn arguments(
        &self,
        layout: PoolLayout,
        sm_scale: f32,
        logits_soft_cap: f32,
        window: Option<usize>,
    ) -> CoreResult<AttentionArguments<'_>> {
        Ok(AttentionArguments {
            q: self.q.array()?,
            out: self.out.array()?,
            lse: self.lse.as_ref().map(ArrayArgument::array).transpose()?,
            k_pages: self.k_pages.array()?,
            v_pages: self.v_pages.array()?,
            new: self.new.as_ref().map(NewBuffers::tokens).transpose()?,
            layout,
            params: AttentionParams {
                sm_scale,
                logits_soft_cap,
                sinks: self.sinks.as_ref().map(ArrayArgument::array).transpose()?,
                window,
            },
        })
    }
}

fn check_page_size(
    plan: &paged_core::plan::DecodePlan,
    k_pages: [usize; 4],
    layout: PoolLayout,
) -> Result<(), Error> {
    let page_size = match layout {
        PoolLayout::Nhd => k_pages[1],
        PoolLayout::Hnd => k_pages[2],
    };
    let expected = plan.config().page_size;
    if page_size != expected {
        return Err(Error::invalid("k_pages", format!("page size {page_size}, the plan has {expected}")));
    }
    Ok(())
}

/// One decode step of a whole batch, see the stub.
#[pyfunction]
#[pyo3(signature = (plan, q, out, k_pages, v_pages, *, lse = None, k_new = None, v_new = None, layout, sm_scale,
    logits_soft_cap = None, sinks = None, window = None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments")]
pub(crate) fn cpu_paged_decode(
    py: Python<'_>,
    plan: Argument<'_, '_>,
    q: Argument<'_, '_>,
    out: Argument<'_, '_>,
    k_pages: Argument<'_, '_>,
    v_pages: Argument<'_, '_>,
    lse: Optional<'_, '_>,
    k_new: Optional<'_, '_>,
    v_new: Optional<'_, '_>,
    layout: Argument<'_, '_>,
    sm_scale: Argument<'_, '_>,
    logits_soft_cap: Optional<'_, '_>,
    sinks: Optional<'_, '_>,
    window: Optional<'_, '_>,
) -> CoreResult<()> {
    let plan = decode_plan(plan)?.get();
    let buffers = Buffers {
        q: ArrayArgument::new("q", q)?,
        out: ArrayArgument::new("out", out)?,
        k_pages: ArrayArgument::new("k_pages", k_pages)?,
        v_pages: ArrayArgument::new("v_pages", v_pages)?,
        lse: ArrayArgument::optional("lse", lse)?,
        new: NewBuffers::optional(k_new, v_new)?,
        sinks: ArrayArgument::optional("sinks", sinks)?,
    };
    let logits_soft_cap = logits_soft_cap.map_or(Ok(0.0), |cap| float("logits_soft_cap", cap))?;
    let window = optional_count("window", window)?;
    let layout = pool_layout(layout)?;
    let mut arguments = buffers.arguments(layout, float("sm_scale", sm_scale)?, logits_soft_cap, window)?;
    plan.run(py, move |plan| {
        check_page_size(plan, arguments.k_pages.shape(), layout)?;
        let planned = plan.config().window;
        arguments.params.window = [window, planned].into_iter().flatten().min();
        attention::decode(Executor::global(), &arguments, &DecodeBatch::from_plan(plan)?)
    })?;
    Ok(())
}

/// Causal attention of the last tokens of one sequence, see the stub.
#[pyfunction]
#[pyo3(signature = (q, out, k_pages, v_pages, *, page_ids, first_page_offset, num_tokens, layout, sm_scale,
    logits_soft_cap = None, sinks = None, window = None, lse = None, k_new = None, v_new = None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments")]
pub(crate) fn cpu_paged_prefill(
    py: Python<'_>,
    q: Argument<'_, '_>,
    out: Argument<'_, '_>,
    k_pages: Argument<'_, '_>,
    v_pages: Argument<'_, '_>,
    page_ids: Argument<'_, '_>,
    first_page_offset: Argument<'_, '_>,
    num_tokens: Argument<'_, '_>,
    layout: Argument<'_, '_>,
    sm_scale: Argument<'_, '_>,
    logits_soft_cap: Optional<'_, '_>,
    sinks: Optional<'_, '_>,
    window: Optional<'_, '_>,
    lse: Optional<'_, '_>,
    k_new: Optional<'_, '_>,
    v_new: Optional<'_, '_>,
) -> CoreResult<()> {
    let buffers = Buffers {
        q: ArrayArgument::new("q", q)?,
        out: ArrayArgument::new("out", out)?,
        k_pages: ArrayArgument::new("k_pages", k_pages)?,
        v_pages: ArrayArgument::new("v_pages", v_pages)?,
        lse: ArrayArgument::optional("lse", lse)?,
        new: NewBuffers::optional(k_new, v_new)?,
        sinks: ArrayArgument::optional("sinks", sinks)?,
    };
    let page_ids = int32_array("page_ids", page_ids)?;
    let sequence = PagedSequence {
        page_ids: &page_ids,
        first_page_offset: count("first_page_offset", first_page_offset)?,
        num_tokens: count("num_tokens", num_tokens)?,
    };
    let logits_soft_cap = logits_soft_cap.map_or(Ok(0.0), |cap| float("logits_soft_cap", cap))?;
    let window = optional_count("window", window)?;
    let arguments =
        buffers.arguments(pool_layout(layout)?, float("sm_scale", sm_scale)?, logits_soft_cap, window)?;
    py.detach(|| attention::prefill(Executor::global(), &arguments, sequence))?;
    Ok(())
}

/// Writes the last tokens of one sequence to their pages, see the stub.
#[pyfunction]
#[pyo3(signature = (k_new, v_new, k_pages, v_pages, *, page_ids, first_page_offset, num_tokens, layout))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments")]
pub(crate) fn cpu_write_pages(
    py: Python<'_>,
    k_new: Argument<'_, '_>,
    v_new: Argument<'_, '_>,
    k_pages: Argument<'_, '_>,
    v_pages: Argument<'_, '_>,
    page_ids: Argument<'_, '_>,
    first_page_offset: Argument<'_, '_>,
    num_tokens: Argument<'_, '_>,
    layout: Argument<'_, '_>,
) -> CoreResult<()> {
    let new = NewBuffers::both(k_new, v_new)?;
    let (k_pages, v_pages) =
        (ArrayArgument::new("k_pages", k_pages)?, ArrayArgument::new("v_pages", v_pages)?);
    let page_ids = int32_array("page_ids", page_ids)?;
    let sequence = PagedSequence {
        page_ids: &page_ids,
        first_page_offset: count("first_page_offset", first_page_offset)?,
        num_tokens: count("num_tokens", num_tokens)?,
    };
    let (new, k_pages, v_pages, layout) =
        (new.tokens()?, k_pages.array()?, v_pages.array()?, pool_layout(layout)?);
    py.detach(|| attention::write_pages(Executor::global(), &new, &k_pages, &v_pages, layout, sequence))?;
    Ok(())
}

/// Writes the newest token of every row of a decode batch to its page, see the stub.
#[pyfunction]
#[pyo3(signature = (plan, k_new, v_new, k_pages, v_pages, *, layout))]
pub(crate) fn cpu_write_decode(
    py: Python<'_>,
    plan: Argument<'_, '_>,
    k_new: Argument<'_, '_>,
    v_new: Argument<'_, '_>,
    k_pages: Argument<'_, '_>,
    v_pages: Argument<'_, '_>,
    layout: Argument<'_, '_>,
) -> CoreResult<()> {
    let plan = decode_plan(plan)?.get();
    let new = NewBuffers::both(k_new, v_new)?;
    let (k_pages, v_pages) =
        (ArrayArgument::new("k_pages", k_pages)?, ArrayArgument::new("v_pages", v_pages)?);
    let (new, k_pages, v_pages, layout) =
        (new.tokens()?, k_pages.array()?, v_pages.array()?, pool_layout(layout)?);
    plan.run(py, |plan| {
        check_page_size(plan, k_pages.shape(), layout)?;
        let batch = DecodeBatch::from_plan(plan)?;
        attention::write_decode(Executor::global(), &new, &k_pages, &v_pages, layout, &batch)
    })?;
    Ok(())
}

/// Copies one page of a pool to another, see the stub.
#[pyfunction]
#[pyo3(signature = (pages, src, dst))]
pub(crate) fn cpu_copy_page(
    py: Python<'_>,
    pages: Argument<'_, '_>,
    src: Argument<'_, '_>,
    dst: Argument<'_, '_>,
) -> CoreResult<()> {
    let pages = ArrayArgument::new("pages", pages)?;
    let (src, dst) = (count("src", src)?, count("dst", dst)?);
    let pages = pages.array()?;
    py.detach(|| attention::copy_page(&pages, src, dst))?;
    Ok(())
}

/// Best rate of plain reads of `num_bytes` bytes by all threads, see the stub.
#[pyfunction]
#[pyo3(signature = (num_bytes, repeats))]
pub(crate) fn cpu_memory_roof(
    py: Python<'_>,
    num_bytes: Argument<'_, '_>,
    repeats: Argument<'_, '_>,
) -> CoreResult<f64> {
    let (num_bytes, repeats) = (count("num_bytes", num_bytes)?, count("repeats", repeats)?);
    Ok(py.detach(|| attention::memory_roof(Executor::global(), num_bytes, repeats))?)
}

/// Seconds of one plain read of a buffer by all threads, see the stub.
#[pyfunction]
#[pyo3(signature = (memory))]
pub(crate) fn cpu_read_seconds(py: Python<'_>, memory: &Bound<'_, PyAny>) -> CoreResult<f64> {
    let invalid = |what: &str| Error::invalid("memory", what.to_owned());
    let buffer = PyBuffer::<u8>::get(memory).map_err(|_| invalid("no buffer of bytes"))?;
    if !buffer.is_c_contiguous() || buffer.len_bytes() == 0 {
        return Err(invalid("not contiguous, or empty").into());
    }
    // SAFETY: the buffer holds that many bytes for as long as it lives, and every bit pattern is an f32. A writer on another
    // thread would be the caller's mistake; sums of torn values are thrown away.
    let bytes = unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) };
    // SAFETY: as above.
    let (_, data, _) = unsafe { bytes.align_to::<f32>() };
    Ok(py.detach(|| attention::read_seconds(Executor::global(), data)))
}

/// Instruction set that the kernels run with, see the stub.
#[pyfunction]
pub(crate) fn simd_level() -> &'static str {
    Executor::global().simd().name()
}

/// Threads that the kernels run on, see the stub.
#[pyfunction]
pub(crate) fn num_threads() -> usize {
    Executor::global().num_threads()
}
