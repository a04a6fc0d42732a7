//! What must hold after every operation, computed from the model alone.

use paged_core::plan::{Csr, DecodePlan, MIN_CHUNK_TOKENS, SLICE_TOKENS, WorkItem};

use crate::world::World;

impl World {
    pub fn check(&mut self) {
        self.plan.ensure_work_list();
        self.plan.validate().unwrap();
        self.check_pool();
        let expected = self.csr_from_scratch();
        assert_eq!(self.plan.export_csr(), expected);
        self.check_contents();
        self.check_snapshot(&expected);

        let mut fresh = DecodePlan::new(self.setup.config()).unwrap();
        fresh.rebuild(expected.view(), Some(&expected.positions)).unwrap();
        assert_eq!(fresh.export_csr(), expected);
        self.check_work(&self.plan);
        self.check_work(&fresh);
        if self.setup.batch_invariant {
            self.check_batch_invariance(&expected);
        } else {
            self.check_balance(&fresh);
        }
        let epoch = self.plan.epoch();
        assert!(epoch >= self.last_epoch);
        self.last_epoch = epoch;
    }

    fn check_pool(&self) {
        self.pool.check_integrity().unwrap();
        let mut holders = vec![0; self.pool.num_pages()];
        for sequence in &self.live {
            sequence.table.check_integrity().unwrap();
            for &page in &sequence.pages[sequence.table.head_page()..] {
                holders[page as usize] += 1;
            }
        }
        for (page, &count) in holders.iter().enumerate() {
            assert_eq!(self.pool.refcount(page as u32).unwrap(), count, "page {page}");
        }
    }

    fn csr_from_scratch(&self) -> Csr {
        let size = self.setup.page_size;
        let mut csr = Csr { indptr: vec![0], ..Csr::default() };
        for sequence in &self.live {
            let num_tokens = sequence.tokens.len();
            if num_tokens > sequence.row_begin {
                csr.indices
                    .extend(sequence.pages[sequence.row_begin / size..].iter().map(|&page| page as i32));
                csr.last_page_len.push(((num_tokens - 1) % size) as i32 + 1);
                csr.first_page_offset.push((sequence.row_begin % size) as i32);
            } else {
                csr.last_page_len.push(0);
                csr.first_page_offset.push(0);
            }
            csr.indptr.push(csr.indices.len() as i32);
            csr.lengths.push((num_tokens - sequence.row_begin) as i32);
            csr.positions.push(num_tokens as i32);
        }
        csr
    }

    /// Visible tokens of a row, counted from its first table token.
    fn visible(&self, row: usize) -> std::ops::Range<usize> {
        let length = self.live[row].tokens.len() - self.live[row].row_begin;
        length - self.setup.window.unwrap_or(length).min(length)..length
    }

    /// Each row's pages hold its visible tokens, whatever was forked, copied or given back before.
    fn check_contents(&self) {
        let size = self.setup.page_size;
        for (row, sequence) in self.live.iter().enumerate() {
            let view = self.plan.row(row).unwrap();
            assert_eq!(self.plan.row_of(sequence.slot).unwrap(), row);
            assert_eq!(self.plan.slot_row(sequence.slot.index).unwrap().pages, view.pages);
            let window = self.setup.window.unwrap_or(usize::MAX);
            assert_eq!(
                self.visible(row).len(),
                sequence.tokens.len().min(window),
                "a visible token is not in the row"
            );
            for token in self.visible(row) {
                let at = view.first_page_offset + token;
                let stored = self.memory[view.pages[at / size] as usize * size + at % size];
                assert_eq!(stored, sequence.tokens[sequence.row_begin + token]);
            }
        }
    }

    fn check_snapshot(&self, expected: &Csr) {
        let snapshot = self.plan.reader().snapshot();
        let (epoch, slots) = self.plan.identity();
        assert_eq!((snapshot.epoch, &snapshot.slots, &snapshot.csr), (epoch, &slots, expected));
        assert_eq!(slots, self.live.iter().map(|sequence| sequence.slot).collect::<Vec<_>>());
        assert!(snapshot.is_work_current);
        assert_eq!(snapshot.work_items, self.plan.work().unwrap().items);
    }

    /// Non-empty token ranges of a row's items in list order, under the window.
    fn ranges(&self, plan: &DecodePlan, row: usize) -> Vec<(usize, usize)> {
        let visible = self.visible(row);
        let slot = plan.slot_of(row).unwrap().index as i32;
        let items = plan.work().unwrap().items.iter().filter(|item| item.slot == slot);
        let clip = |item: &WorkItem| {
            (visible.start.max(item.kv_begin as usize), visible.end.min(item.kv_end.try_into().unwrap()))
        };
        items.map(clip).filter(|(begin, end)| begin < end).collect()
    }

    fn check_work(&self, plan: &DecodePlan) {
        let work = plan.work().unwrap();
        let num_rows = self.live.len();
        assert!(work.items.len() <= plan.num_work_items());
        if !self.setup.batch_invariant {
            assert!(work.items.len() <= plan.split_target() + num_rows);
        }
        for row in 0..num_rows {
            let ranges = self.ranges(plan, row);
            let mut count = vec![0; self.visible(row).end];
            ranges
                .iter()
                .for_each(|&(begin, end)| count[begin..end].iter_mut().for_each(|times| *times += 1));
            assert!(count[self.visible(row)].iter().all(|&times| times == 1), "row {row}: {ranges:?}");
            assert!(ranges.len() <= self.setup.num_splits.unwrap_or(usize::MAX));
        }
        // Results: a row of the output each for direct items, distinct partial rows for the others.
        let direct = work.items.iter().filter(|item| !item.is_split()).map(|item| item.out_row);
        let merged = work.merges.iter().map(|merge| merge.row);
        let mut rows: Vec<i32> = direct.chain(merged).collect();
        rows.sort_unstable();
        assert_eq!(rows, (0..num_rows as i32).collect::<Vec<_>>());
        let split = work.items.iter().filter(|item| item.is_split()).map(|item| (item.out_row, item.slot));
        let mut partials: Vec<(i32, i32)> = split.collect();
        partials.sort_unstable();
        let slots = work.merges.iter().flat_map(|merge| {
            let slot = plan.slot_of(merge.row as usize).unwrap().index as i32;
            (merge.partial_begin..merge.partial_begin + merge.num_partials)
                .map(move |partial| (partial, slot))
        });
        assert_eq!(partials, slots.collect::<Vec<_>>());
        assert_eq!(work.num_partial_rows, partials.len());
    }

    fn longest(&self, plan: &DecodePlan) -> usize {
        let ranges = (0..self.live.len()).flat_map(|row| self.ranges(plan, row));
        ranges.map(|(begin, end)| end - begin).max().unwrap_or(0)
    }

    fn check_balance(&self, fresh: &DecodePlan) {
        // Whole slices at both ends of a row.
        let tokens: usize = (0..self.live.len()).map(|row| self.visible(row).len() + 2 * SLICE_TOKENS).sum();
        let target = tokens.div_ceil(self.plan.split_target()).max(MIN_CHUNK_TOKENS) + SLICE_TOKENS;
        let mut bound = target * 3 / 2;
        if self.setup.num_splits.is_some() {
            let best = self.longest(fresh) + 2 * SLICE_TOKENS;
            bound = bound.max(best * 6 / 5);
        }
        assert!(self.longest(&self.plan) <= bound, "longest {} > {bound}", self.longest(&self.plan));
    }

    /// A row's chunks are the same in a batch of its own.
    fn check_batch_invariance(&self, csr: &Csr) {
        let slots = self.plan.identity().1;
        for (row, slot) in slots.iter().enumerate() {
            let pages = csr.indptr[row] as usize..csr.indptr[row + 1] as usize;
            let alone = Csr {
                indptr: vec![0, pages.len() as i32],
                indices: csr.indices[pages].to_vec(),
                last_page_len: vec![csr.last_page_len[row]],
                first_page_offset: vec![csr.first_page_offset[row]],
                ..Csr::default()
            };
            let mut plan = DecodePlan::new(self.setup.config()).unwrap();
            plan.rebuild(alone.view(), Some(&[csr.positions[row]])).unwrap();
            // Also the number of items, as one item and a split one take different ways through a kernel.
            let clip = |item: &WorkItem| item.tokens(self.visible(row).end, self.setup.window);
            let alone: Vec<_> = plan.work().unwrap().items.iter().map(clip).collect();
            let items = self.plan.work().unwrap().items.iter().filter(|item| item.slot == slot.index as i32);
            assert_eq!(items.map(clip).collect::<Vec<_>>(), alone, "row {row}");
        }
    }
}
