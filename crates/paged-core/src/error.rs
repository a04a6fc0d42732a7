//! The one error type of the crate. Every variant carries its values; the message states what happened, `hint` what to do.
//!
//! Nothing is half-applied when an operation returns an error: the object is as it was before the call.

/// Result of every fallible operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the values that the caller needs to act.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The pool holds fewer free pages than asked for.
    #[error("out of pages: needed {needed}, free {free}")]
    OutOfPages {
        /// Pages that the call asked for.
        needed: usize,
        /// Pages that were free.
        free: usize,
    },
    /// The KV budget does not hold the workspace and one page.
    #[error(
        "KV budget of {total_bytes} bytes is too small: the workspace takes {workspace_bytes} bytes and one page \
         {page_bytes} bytes, smallest usable budget {smallest_usable_bytes} bytes"
    )]
    BudgetTooSmall {
        /// The budget as given.
        total_bytes: u64,
        /// Bytes set aside for the kernel workspace.
        workspace_bytes: u64,
        /// Bytes of one page over all layers.
        page_bytes: u64,
        /// The smallest budget that gives one page.
        smallest_usable_bytes: u64,
    },
    /// A reservation does not fit what is left of the budget.
    #[error("budget exceeded: needed {needed} pages, available {available} of {total}")]
    BudgetExceeded {
        /// Pages asked for.
        needed: u64,
        /// Pages not reserved.
        available: u64,
        /// Pages of the whole budget.
        total: u64,
    },
    /// An argument's value is out of its domain.
    #[error("invalid {argument}: {message}")]
    InvalidArgument {
        /// Name of the argument.
        argument: &'static str,
        /// What is wrong with it, value included.
        message: String,
    },
    /// An argument's type, dtype or layout cannot be used.
    #[error("invalid type of {argument}: {message}")]
    InvalidType {
        /// Name of the argument.
        argument: &'static str,
        /// What was found and what is accepted.
        message: String,
    },
    /// A fixed capacity of the plan is used up.
    #[error("plan is full: {what}, needed {needed}, capacity {capacity}")]
    PlanFull {
        /// Which capacity.
        what: &'static str,
        /// What the call needed.
        needed: usize,
        /// What the plan was built with.
        capacity: usize,
    },
    /// A slot was retired, and perhaps given to another sequence, since the caller got it.
    #[error("stale slot {index}: generation {expected}, found {found}")]
    StaleSlot {
        /// Slot index.
        index: u32,
        /// Generation that the caller holds.
        expected: u32,
        /// Generation of the slot now.
        found: u32,
    },
    /// A plan or CSR description breaks an invariant.
    #[error("invalid plan: {message}")]
    InvalidPlan {
        /// The broken invariant, with the row and the values.
        message: String,
    },
    /// The operation or the state shows that page accounting is broken.
    #[error("page accounting is corrupt: {message}")]
    Corrupt {
        /// What was found.
        message: String,
    },
    /// The operating system refused the memory.
    #[error("cannot allocate {bytes} bytes")]
    AllocationFailed {
        /// Bytes asked for.
        bytes: usize,
    },
}

/// The kinds of [`Error`], each with a stable slug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// See [`Error::OutOfPages`].
    OutOfPages,
    /// See [`Error::BudgetTooSmall`].
    BudgetTooSmall,
    /// See [`Error::BudgetExceeded`].
    BudgetExceeded,
    /// See [`Error::InvalidArgument`].
    InvalidArgument,
    /// See [`Error::InvalidType`].
    InvalidType,
    /// See [`Error::PlanFull`].
    PlanFull,
    /// See [`Error::StaleSlot`].
    StaleSlot,
    /// See [`Error::InvalidPlan`].
    InvalidPlan,
    /// See [`Error::Corrupt`].
    Corrupt,
    /// See [`Error::AllocationFailed`].
    AllocationFailed,
}

impl ErrorKind {
    /// Every kind, for tables and tests.
    pub const ALL: [Self; 10] = [
        Self::OutOfPages,
        Self::BudgetTooSmall,
        Self::BudgetExceeded,
        Self::InvalidArgument,
        Self::InvalidType,
        Self::PlanFull,
        Self::StaleSlot,
        Self::InvalidPlan,
        Self::Corrupt,
        Self::AllocationFailed,
    ];

    /// Stable machine-readable name.
    pub const fn slug(self) -> &'static str {
        match self {
            Self::OutOfPages => "out_of_pages",
            Self::BudgetTooSmall => "budget_too_small",
            Self::BudgetExceeded => "budget_exceeded",
            Self::InvalidArgument => "invalid_argument",
            Self::InvalidType => "invalid_type",
            Self::PlanFull => "plan_full",
            Self::StaleSlot => "stale_slot",
            Self::InvalidPlan => "invalid_plan",
            Self::Corrupt => "corrupt",
            Self::AllocationFailed => "allocation_failed",
        }
    }
}

impl Error {
    /// Builds an [`Error::InvalidArgument`].
    #[cold]
    pub fn invalid(argument: &'static str, message: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, message: message.into() }
    }

    /// Builds an [`Error::InvalidType`].
    #[cold]
    pub fn invalid_type(argument: &'static str, message: impl Into<String>) -> Self {
        Self::InvalidType { argument, message: message.into() }
    }

    /// Builds an [`Error::InvalidPlan`].
    #[cold]
    pub fn invalid_plan(message: impl Into<String>) -> Self {
        Self::InvalidPlan { message: message.into() }
    }

    /// Builds an [`Error::Corrupt`].
    #[cold]
    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::Corrupt { message: message.into() }
    }

    /// The kind of this error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::OutOfPages { .. } => ErrorKind::OutOfPages,
            Self::BudgetTooSmall { .. } => ErrorKind::BudgetTooSmall,
            Self::BudgetExceeded { .. } => ErrorKind::BudgetExceeded,
            Self::InvalidArgument { .. } => ErrorKind::InvalidArgument,
            Self::InvalidType { .. } => ErrorKind::InvalidType,
            Self::PlanFull { .. } => ErrorKind::PlanFull,
            Self::StaleSlot { .. } => ErrorKind::StaleSlot,
            Self::InvalidPlan { .. } => ErrorKind::InvalidPlan,
            Self::Corrupt { .. } => ErrorKind::Corrupt,
            Self::AllocationFailed { .. } => ErrorKind::AllocationFailed,
        }
    }

    /// What the caller can do about it, where there is something.
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::OutOfPages { .. } => Some("release or preempt a sequence, or raise the KV budget"),
            Self::BudgetTooSmall { .. } => Some("raise the KV budget to the smallest usable one or above"),
            Self::BudgetExceeded { .. } => {
                Some("wait for a reservation to be released, or raise the KV budget")
            }
            Self::PlanFull { .. } => Some("build the plan with a larger capacity"),
            Self::StaleSlot { .. } => {
                Some("a slot ends with its sequence: use the one that the last admit returned")
            }
            Self::AllocationFailed { .. } => Some("build with smaller capacities"),
            Self::InvalidArgument { .. }
            | Self::InvalidType { .. }
            | Self::InvalidPlan { .. }
            | Self::Corrupt { .. } => None,
        }
    }
}
