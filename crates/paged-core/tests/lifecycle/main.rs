//! The whole life cycle of pages, tables and plan against a naive model, which is compared after every operation.

mod check;
mod world;

use proptest::prelude::*;
use proptest::sample::Index;
use world::{Setup, World};

/// One thing that a scheduler does. `Index` picks among what is there.
#[derive(Debug, Clone)]
enum Op {
    Admit { num_tokens: usize },
    Fork(Index),
    Steps { count: usize, retire_first: bool },
    Preempt(Index),
    Resume(Index),
    Abort(Index),
    UseStaleSlot,
    AdvanceWithoutPages,
}

fn op() -> impl Strategy<Value = Op> {
    let any_row = any::<Index>;
    prop_oneof![
        6 => prop_oneof![0usize..40, 0usize..1500].prop_map(|num_tokens| Op::Admit { num_tokens }),
        2 => any_row().prop_map(Op::Fork),
        8 => (prop_oneof![Just(1usize), 2usize..12, 12usize..300], any::<bool>())
            .prop_map(|(count, retire_first)| Op::Steps { count, retire_first }),
        1 => any_row().prop_map(Op::Preempt),
        2 => any_row().prop_map(Op::Resume),
        1 => any_row().prop_map(Op::Abort),
        1 => Just(Op::UseStaleSlot),
        1 => Just(Op::AdvanceWithoutPages),
    ]
}

fn setup() -> impl Strategy<Value = Setup> {
    let page_size = prop_oneof![Just(1usize), Just(3), Just(8), Just(16), Just(20), Just(32)];
    let window = prop_oneof![3 => Just(None), 1 => prop_oneof![1usize..70, 70usize..900].prop_map(Some)];
    let num_splits = prop_oneof![3 => Just(None), 1 => (1usize..6).prop_map(Some)];
    (page_size, window, num_splits, any::<bool>(), 1usize..9, 1usize..3, prop_oneof![Just(1usize), Just(4)])
        .prop_map(|(page_size, window, num_splits, batch_invariant, num_workers, num_kv_heads, waves)| {
            Setup { page_size, window, num_splits, batch_invariant, num_workers, num_kv_heads, waves }
        })
}

fn run(setup: Setup, ops: &[Op]) {
    let mut world = World::new(setup);
    for op in ops {
        match *op {
            Op::Admit { num_tokens } => world.admit(num_tokens),
            Op::Fork(index) => world.fork(index),
            Op::Steps { count, retire_first } => (0..count).for_each(|_| world.step(retire_first)),
            Op::Preempt(index) => world.preempt(index),
            Op::Resume(index) => world.resume(index),
            Op::Abort(index) => world.abort(index),
            Op::UseStaleSlot => world.use_stale_slot(),
            Op::AdvanceWithoutPages => world.advance_without_pages(),
        }
        world.check();
    }
    world.finish();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn every_state_equals_a_build_from_scratch(setup in setup(), ops in prop::collection::vec(op(), 1..60)) {
        run(setup, &ops);
    }
}
