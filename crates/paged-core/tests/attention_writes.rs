//! Page writes and copies: every byte that should change does, and no other.

mod oracle;

use half::{bf16, f16};
use oracle::{Case, Rng, Shape, TestElement, executors, new_tokens};
use paged_core::attention::{
    Array, AttentionArguments, DecodeBatch, PoolLayout, copy_page, decode, prefill, write_decode, write_pages,
};

const LAYOUTS: [PoolLayout; 2] = [PoolLayout::Nhd, PoolLayout::Hnd];

fn values<T: TestElement>(seed: u64, num: usize) -> Vec<T> {
    let mut rng = Rng::new(seed);
    (0..num).map(|_| T::from_f32(rng.value())).collect()
}

fn bits<T: TestElement>(values: &[T]) -> Vec<u64> {
    values.iter().map(|x| x.to_f64().to_bits()).collect()
}

/// The pools after `new` was written to the last tokens, one element at a time.
fn expected<T: TestElement, N: TestElement>(
    case: &Case<T>,
    k: &[N],
    v: &[N],
    rows: &[(usize, usize)],
) -> (Vec<T>, Vec<T>) {
    let (heads, dim) = (case.shape.num_kv_heads, case.shape.head_dim);
    let (mut k_pool, mut v_pool) = (case.k.clone(), case.v.clone());
    for (i, (row, token)) in rows.iter().enumerate() {
        for head in 0..heads {
            let at = case.element(*row, *token, head);
            for j in 0..dim {
                k_pool[at + j] = T::from_f32(k[(i * heads + head) * dim + j].to_f64() as f32);
                v_pool[at + j] = T::from_f32(v[(i * heads + head) * dim + j].to_f64() as f32);
            }
        }
    }
    (k_pool, v_pool)
}

fn check_write_pages<T: TestElement, N: TestElement>(layout: PoolLayout, num_new: usize, page: usize) {
    let mut shape = Shape::new(page, 80, 2, 1, &[37]);
    shape.layout = layout;
    shape.rows[0].1 = page / 3;
    let case = Case::<T>::random(shape, 1);
    let (k, v) = (values::<N>(2, num_new * 160), values::<N>(3, num_new * 160));
    let rows: Vec<_> = (37 - num_new..37).map(|token| (0, token)).collect();
    let (k_expected, v_expected) = expected(&case, &k, &v, &rows);
    for executor in executors() {
        let (mut k_pool, mut v_pool) = (case.k.clone(), case.v.clone());
        let k_pages = Array::from_slice_mut("k_pages", &mut k_pool, case.pool_shape(), None).unwrap();
        let v_pages = Array::from_slice_mut("v_pages", &mut v_pool, case.pool_shape(), None).unwrap();
        let new = new_tokens(&k, &v, [num_new, 2, 80]);
        write_pages(&executor, &new, &k_pages, &v_pages, layout, case.sequence(0)).unwrap();
        assert_eq!(bits(&k_pool), bits(&k_expected), "{layout:?} {num_new} new, page {page}");
        assert_eq!(bits(&v_pool), bits(&v_expected), "{layout:?} {num_new} new, page {page}");
    }
}

#[test]
fn write_pages_changes_the_last_tokens_only() {
    for layout in LAYOUTS {
        for num_new in [0, 1, 5, 16, 37] {
            for page in [1, 8, 16] {
                check_write_pages::<f32, f32>(layout, num_new, page);
                check_write_pages::<f16, f16>(layout, num_new, page);
            }
        }
        // Elements are converted, ties to even.
        check_write_pages::<f16, f32>(layout, 9, 8);
        check_write_pages::<bf16, f32>(layout, 9, 8);
        check_write_pages::<f32, bf16>(layout, 9, 8);
        check_write_pages::<bf16, f16>(layout, 9, 8);
    }
}

#[test]
fn write_decode_changes_the_last_token_of_each_row() {
    for layout in LAYOUTS {
        let mut shape = Shape::new(8, 64, 3, 1, &[1, 8, 9, 30]);
        shape.layout = layout;
        shape.rows[1].1 = 5;
        let case = Case::<bf16>::random(shape, 4);
        let (k, v) = (values::<f32>(5, 4 * 192), values::<f32>(6, 4 * 192));
        let (k_expected, v_expected) = expected(&case, &k, &v, &[(0, 0), (1, 7), (2, 8), (3, 29)]);
        for executor in executors() {
            let (mut k_pool, mut v_pool) = (case.k.clone(), case.v.clone());
            let k_pages = Array::from_slice_mut("k_pages", &mut k_pool, case.pool_shape(), None).unwrap();
            let v_pages = Array::from_slice_mut("v_pages", &mut v_pool, case.pool_shape(), None).unwrap();
            let new = new_tokens(&k, &v, [4, 3, 64]);
            write_decode(&executor, &new, &k_pages, &v_pages, layout, &case.batch(1)).unwrap();
            assert_eq!(bits(&k_pool), bits(&k_expected));
            assert_eq!(bits(&v_pool), bits(&v_expected));
        }
    }
}

/// Runs `launch` with and without new tokens in its arguments: writing first must give the same bits.
fn check_fused_append(
    case: &Case<f16>,
    num_rows: usize,
    rows: &[(usize, usize)],
    launch: impl Fn(&AttentionArguments<'_>),
) {
    let (heads, dim) = (case.shape.num_kv_heads, case.shape.head_dim);
    let num_new = num_rows * heads * dim;
    let (k, v) = (values::<f32>(7, num_new), values::<f32>(8, num_new));
    let (mut k_expected, mut v_expected) = expected(case, &k, &v, rows);
    let (mut k_pool, mut v_pool) = (case.k.clone(), case.v.clone());
    let shape = [num_rows, case.shape.num_qo_heads(), dim];
    let q = values::<f16>(9, shape.iter().product());
    let run = |k_pool: &mut [f16], v_pool: &mut [f16], is_fused: bool| {
        let mut out = vec![f16::ZERO; q.len()];
        launch(&AttentionArguments {
            q: Array::from_slice("q", &q, shape, None).unwrap(),
            out: Array::from_slice_mut("out", &mut out, shape, None).unwrap(),
            lse: None,
            k_pages: Array::from_slice_mut("k_pages", k_pool, case.pool_shape(), None).unwrap(),
            v_pages: Array::from_slice_mut("v_pages", v_pool, case.pool_shape(), None).unwrap(),
            new: is_fused.then(|| new_tokens(&k, &v, [num_rows, heads, dim])),
            layout: case.shape.layout,
            params: case.params(),
        });
        out
    };
    let separate = run(&mut k_expected, &mut v_expected, false);
    let fused = run(&mut k_pool, &mut v_pool, true);
    assert_eq!(bits(&fused), bits(&separate));
    assert_eq!(bits(&k_pool), bits(&k_expected));
    assert_eq!(bits(&v_pool), bits(&v_expected));
}

#[test]
fn fused_append_equals_writing_first() {
    for layout in LAYOUTS {
        let mut shape = Shape::new(16, 96, 2, 3, &[1, 16, 17, 100]);
        shape.layout = layout;
        let case = Case::<f16>::random(shape, 10);
        for executor in executors() {
            let rows = [(0, 0), (1, 15), (2, 16), (3, 99)];
            check_fused_append(&case, 4, &rows, |arguments| {
                decode(&executor, arguments, &case.batch(2)).unwrap()
            });
            let rows: Vec<_> = (60..100).map(|token| (3, token)).collect();
            let sequence = case.sequence(3);
            check_fused_append(&case, 40, &rows, |arguments| {
                prefill(&executor, arguments, sequence).unwrap()
            });
        }
    }
}

#[test]
fn a_row_without_tokens_has_no_place_for_a_new_one() {
    let case = Case::<f32>::random(Shape::new(8, 64, 1, 1, &[3, 0]), 11);
    let (k, v) = (values::<f32>(1, 128), values::<f32>(2, 128));
    let (mut k_pool, mut v_pool) = (case.k.clone(), case.v.clone());
    let k_pages = Array::from_slice_mut("k_pages", &mut k_pool, case.pool_shape(), None).unwrap();
    let v_pages = Array::from_slice_mut("v_pages", &mut v_pool, case.pool_shape(), None).unwrap();
    let new = new_tokens(&k, &v, [2, 1, 64]);
    let executor = &executors()[0];
    let batch: DecodeBatch<'_> = case.batch(1);
    let error = write_decode(executor, &new, &k_pages, &v_pages, PoolLayout::Hnd, &batch).unwrap_err();
    assert_eq!(error.to_string(), "invalid k_new: row 1 holds no token to write to");
    assert_eq!(bits(&k_pool), bits(&case.k));
}

#[test]
fn copy_page_copies_one_page_whatever_the_strides() {
    let (pages, a, b, dim) = (5, 3, 4, 16);
    let plain = [(a * b * dim) as isize, (b * dim) as isize, dim as isize, 1];
    // Dimensions 1 and 2 swapped in memory, and rows with gaps.
    let swapped = [(a * b * dim) as isize, dim as isize, (a * dim) as isize, 1];
    let gaps = [1000, 300, 20, 1];
    for strides in [plain, swapped, gaps] {
        let data = values::<f32>(1, 5000);
        let index =
            |i: [usize; 4]| i.iter().zip(strides).map(|(i, stride)| i * stride as usize).sum::<usize>();
        let mut expected = data.clone();
        for i in 0..a {
            for j in 0..b {
                for d in 0..dim {
                    expected[index([3, i, j, d])] = data[index([1, i, j, d])];
                }
            }
        }
        let mut found = data.clone();
        copy_page(
            &Array::from_slice_mut("pages", &mut found, [pages, a, b, dim], Some(strides)).unwrap(),
            1,
            3,
        )
        .unwrap();
        assert_eq!(found, expected, "{strides:?}");
    }
    let mut data = values::<f32>(1, 960);
    for (from, to, argument) in [(5, 0, "src"), (0, 5, "dst"), (usize::MAX, 0, "src")] {
        let pages = Array::from_slice_mut("pages", &mut data, [5, 3, 4, 16], None).unwrap();
        let error = copy_page(&pages, from, to).unwrap_err().to_string();
        assert!(error.starts_with(&format!("invalid {argument}: page")), "{error}");
    }
    let error =
        copy_page(&Array::from_slice("pages", &data, [5, 3, 4, 16], None).unwrap(), 0, 1).unwrap_err();
    assert!(error.to_string().contains("read-only"), "{error}");
}
