//! The system under test beside a model that keeps every token of every sequence and every page's contents.

use std::sync::Arc;

use paged_core::plan::{DecodePlan, PlanConfig};
use paged_core::{Error, HeadGeometry, PagePool, PageTable, Slot};
use proptest::sample::Index;

pub const MAX_SLOTS: usize = 5;
pub const MAX_TOKENS: usize = 2048;

#[derive(Debug, Clone)]
pub struct Setup {
    pub page_size: usize,
    pub window: Option<usize>,
    pub num_splits: Option<usize>,
    pub batch_invariant: bool,
    pub num_workers: usize,
    pub num_kv_heads: usize,
    pub waves: usize,
}

impl Setup {
    pub fn config(&self) -> PlanConfig {
        let heads = HeadGeometry {
            num_qo_heads: 2 * self.num_kv_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: 64,
        };
        let mut config =
            PlanConfig::new(MAX_SLOTS, self.max_pages_per_slot(), self.num_pages(), self.page_size, heads);
        config.window = self.window;
        config.num_splits = self.num_splits;
        config.batch_invariant = self.batch_invariant;
        config.num_workers = Some(self.num_workers);
        config.waves = self.waves;
        config
    }

    /// A window row still has to hold a whole prompt while it is admitted.
    pub fn max_pages_per_slot(&self) -> usize {
        MAX_TOKENS.div_ceil(self.page_size)
    }

    /// Enough for about two of the longest sequences, so that the pool runs dry often.
    pub fn num_pages(&self) -> usize {
        2 * self.max_pages_per_slot()
    }
}

/// A live row: its table, its slot, and what the model knows.
pub struct Sequence {
    pub table: PageTable,
    pub slot: Slot,
    /// Identity of each token since the start.
    pub tokens: Vec<u64>,
    /// Page of each absolute page number, given back ones included.
    pub pages: Vec<u32>,
    /// The row of the plan begins at this absolute token.
    pub row_begin: usize,
}

pub struct World {
    pub setup: Setup,
    pub pool: Arc<PagePool>,
    pub plan: DecodePlan,
    /// In order of admission.
    pub live: Vec<Sequence>,
    pub preempted: Vec<Vec<u64>>,
    /// Token stored at `page * page_size + entry`.
    pub memory: Vec<u64>,
    pub last_epoch: u64,
    stale_slots: Vec<Slot>,
    next_token: u64,
}

impl World {
    pub fn new(setup: Setup) -> Self {
        let plan = DecodePlan::new(setup.config()).unwrap();
        Self {
            pool: Arc::new(PagePool::new(setup.num_pages()).unwrap()),
            memory: vec![0; setup.num_pages() * setup.page_size],
            plan,
            setup,
            live: Vec::new(),
            preempted: Vec::new(),
            last_epoch: 0,
            stale_slots: Vec::new(),
            next_token: 1,
        }
    }

    fn fresh_tokens(&mut self, count: usize) -> Vec<u64> {
        let first = self.next_token;
        self.next_token += count as u64;
        (first..self.next_token).collect()
    }

    fn write(&mut self, pages: &[u32], tokens: &[u64], begin: usize) {
        for (position, &token) in tokens.iter().enumerate().skip(begin) {
            let page = pages[position / self.setup.page_size] as usize;
            self.memory[page * self.setup.page_size + position % self.setup.page_size] = token;
        }
    }

    pub fn admit(&mut self, num_tokens: usize) {
        let tokens = self.fresh_tokens(num_tokens);
        self.start(tokens);
    }

    /// Prefills a new table and gives it a row, or leaves everything as it was; false then.
    fn start(&mut self, tokens: Vec<u64>) -> bool {
        let mut table =
            PageTable::new(Arc::clone(&self.pool), self.setup.page_size, self.setup.window).unwrap();
        let needed = tokens.len().div_ceil(self.setup.page_size);
        let free = self.pool.num_free();
        let append = match table.append(tokens.len()) {
            Ok(append) => append,
            Err(error) => {
                assert_eq!(error, Error::OutOfPages { needed, free });
                assert_eq!((table.num_tokens(), self.pool.num_free()), (0, free));
                return false;
            }
        };
        let pages = append.new_pages;
        self.write(&pages, &tokens, 0);
        let retired = table.retire_head().unwrap();
        assert_eq!(retired, pages[..retired.len()]);
        self.add_row(table, pages, tokens)
    }

    fn add_row(&mut self, table: PageTable, pages: Vec<u32>, tokens: Vec<u64>) -> bool {
        let offset = table.first_page_offset();
        let admitted = self.plan.admit(table.pages(), table.kv_len(), offset, Some(table.num_tokens()));
        if self.live.len() == MAX_SLOTS {
            assert!(matches!(admitted, Err(Error::PlanFull { capacity: MAX_SLOTS, .. })));
            return false;
        }
        let row_begin = tokens.len() - table.kv_len();
        self.live.push(Sequence { table, slot: admitted.unwrap(), tokens, pages, row_begin });
        true
    }

    pub fn fork(&mut self, index: Index) {
        if self.live.is_empty() {
            return;
        }
        let parent = &self.live[index.index(self.live.len())];
        let (table, pages, tokens) =
            (parent.table.fork().unwrap(), parent.pages.clone(), parent.tokens.clone());
        self.add_row(table, pages, tokens);
    }

    /// One decode step of every row. `retire_first`: head pages leave the plan before the step's token comes.
    pub fn step(&mut self, retire_first: bool) {
        self.live.retain_mut(|sequence| {
            let is_full = sequence.tokens.len() + 1 > MAX_TOKENS;
            if is_full {
                self.plan.retire(sequence.slot).unwrap();
                self.stale_slots.push(sequence.slot);
            }
            !is_full
        });
        let needed =
            |world: &Self| world.live.iter().map(|row| row.table.pages_needed(1).unwrap()).sum::<usize>();
        while needed(self) > self.pool.num_free() {
            let least = (0..self.live.len()).min_by_key(|&row| self.live[row].tokens.len()).unwrap();
            self.preempt_row(least);
        }
        let expected: Vec<Slot> = self.rows_at_page_end();
        assert_eq!(self.plan.rows_needing_page(), expected);
        for row in 0..self.live.len() {
            self.append_token(row);
            if retire_first {
                self.retire_head(row);
            }
        }
        self.plan.advance().unwrap();
        if !retire_first {
            (0..self.live.len()).for_each(|row| self.retire_head(row));
        }
        self.plan.ensure_work_list();
    }

    fn rows_at_page_end(&self) -> Vec<Slot> {
        let full = self.live.iter().filter(|row| row.tokens.len().is_multiple_of(self.setup.page_size));
        full.map(|row| row.slot).collect()
    }

    fn append_token(&mut self, row: usize) {
        let token = self.fresh_tokens(1)[0];
        let sequence = &mut self.live[row];
        let append = sequence.table.append(1).unwrap();
        for &(source, target) in &append.copies {
            let size = self.setup.page_size;
            self.memory
                .copy_within(source as usize * size..(source as usize + 1) * size, target as usize * size);
            assert_eq!(sequence.pages.last(), Some(&source));
            *sequence.pages.last_mut().unwrap() = target;
            let last = sequence.pages.len() - 1 - sequence.row_begin / size;
            self.plan.replace_page(sequence.slot, last, target).unwrap();
        }
        for &page in &append.new_pages {
            sequence.pages.push(page);
            self.plan.append_page(sequence.slot, page).unwrap();
        }
        sequence.tokens.push(token);
        let (pages, tokens) = (sequence.pages.clone(), sequence.tokens.clone());
        self.write(&pages, &tokens, tokens.len() - 1);
    }

    fn retire_head(&mut self, row: usize) {
        let sequence = &mut self.live[row];
        let retired = sequence.table.retire_head().unwrap();
        if retired.is_empty() {
            return;
        }
        let head = sequence.table.head_page();
        assert_eq!(retired, sequence.pages[head - retired.len()..head]);
        let offset = sequence.table.first_page_offset();
        self.plan.retire_head_pages(sequence.slot, retired.len(), offset).unwrap();
        sequence.row_begin = head * self.setup.page_size + offset;
    }

    fn preempt_row(&mut self, row: usize) {
        let sequence = self.live.remove(row);
        self.plan.retire(sequence.slot).unwrap();
        self.stale_slots.push(sequence.slot);
        self.preempted.push(sequence.tokens);
    }

    pub fn preempt(&mut self, index: Index) {
        if !self.live.is_empty() {
            self.preempt_row(index.index(self.live.len()));
        }
    }

    /// Recomputes a preempted sequence.
    pub fn resume(&mut self, index: Index) {
        if !self.preempted.is_empty() {
            let tokens = self.preempted.swap_remove(index.index(self.preempted.len()));
            if !self.start(tokens.clone()) {
                self.preempted.push(tokens);
            }
        }
    }

    pub fn abort(&mut self, index: Index) {
        if !self.live.is_empty() {
            let sequence = self.live.remove(index.index(self.live.len()));
            self.plan.retire(sequence.slot).unwrap();
            self.stale_slots.push(sequence.slot);
        }
    }

    /// Every verb refuses a slot whose sequence is gone, and changes nothing.
    pub fn use_stale_slot(&mut self) {
        let before = self.plan.identity();
        for &slot in &self.stale_slots {
            let is_stale = |result: Result<(), Error>| matches!(result, Err(Error::StaleSlot { .. }));
            assert!(is_stale(self.plan.retire(slot)));
            assert!(is_stale(self.plan.append_page(slot, 0)));
            assert!(is_stale(self.plan.replace_page(slot, 0, 0)));
            assert!(is_stale(self.plan.retire_head_pages(slot, 0, 0)));
            assert!(is_stale(self.plan.row_of(slot).map(|_| ())));
        }
        assert_eq!(self.plan.identity(), before);
    }

    /// A step without the pages that it needs is refused as a whole.
    pub fn advance_without_pages(&mut self) {
        if self.rows_at_page_end().is_empty() {
            return;
        }
        let before = (self.plan.identity(), self.plan.export_csr());
        assert!(matches!(self.plan.advance(), Err(Error::InvalidPlan { .. })));
        assert_eq!((self.plan.identity(), self.plan.export_csr()), before);
    }

    /// Ends every sequence; nothing may be left.
    pub fn finish(mut self) {
        for sequence in self.live.drain(..) {
            self.plan.retire(sequence.slot).unwrap();
        }
        assert_eq!((self.plan.num_rows(), self.pool.num_used()), (0, 0));
        self.pool.check_integrity().unwrap();
        self.plan.validate().unwrap();
    }
}
