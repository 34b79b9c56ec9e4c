//! Mixtures of experts, compared with the router's formula in f64 over products of single rows, and
//! with themselves: rows alone and together, other thread counts, every format of weights.

use crate::harness::{assert_close, available, filled, numbers, options, same_bits};
use cleave_checkpoint::{StoredMatrix, StoredTensor};
use cleave_cpu::{CpuMatrix, CpuOps, CpuOptions, CpuVector, CpuWeightLoader, Isa, Quantize};
use cleave_engine::ops::{
    Activation, BufferRole, ChosenWeights, ExpertGroups, Experts, ExpertsSpec, GatedIo,
    GatedMatrices, GatedMlpSpec, GroupScore, InnerSlices, Ops, Precision, RouterScore, RouterSpec,
    SharedExpertSpec, WeightLoader,
};

/// A mixture with random weights.
struct MixtureCase {
    name: &'static str,
    hidden: usize,
    spec: ExpertsSpec,
    /// Whether experts `i` and `i + count / 2` have the same row in the router, so that ties
    /// decide.
    has_pairs: bool,
}

const fn mlp(width: usize, activation: Activation, bias: bool) -> GatedMlpSpec {
    GatedMlpSpec {
        width,
        activation,
        bias,
    }
}

const SOFTMAX: RouterSpec = RouterSpec {
    score: RouterScore::Softmax,
    has_bias: false,
    has_choice_bias: false,
    groups: None,
    weights: ChosenWeights::Scores,
    scale: 1.0,
};

const fn groups(count: usize, chosen: usize, score: GroupScore) -> Option<ExpertGroups> {
    Some(ExpertGroups {
        count,
        chosen,
        score,
    })
}

/// Routers of published models, with sizes in which vectors and panels have rests.
fn cases() -> Vec<MixtureCase> {
    let plain = ExpertsSpec {
        count: 8,
        chosen: 3,
        expert: mlp(48, Activation::Silu, false),
        router: SOFTMAX,
        shared: None,
    };
    let case = |name, spec| MixtureCase {
        name,
        hidden: 80,
        spec,
        has_pairs: false,
    };
    let normalized = |epsilon| ChosenWeights::Normalized { epsilon };
    let deepseek = RouterSpec {
        score: RouterScore::Sigmoid,
        has_choice_bias: true,
        groups: groups(4, 2, GroupScore::TwoBestSum),
        weights: normalized(1e-20),
        scale: 2.5,
        ..SOFTMAX
    };
    let shared = |width, has_gate| {
        let mlp = mlp(width, Activation::Silu, false);
        Some(SharedExpertSpec { mlp, has_gate })
    };
    vec![
        case("olmoe", plain),
        MixtureCase {
            hidden: 96,
            ..case(
                "groups of 32",
                ExpertsSpec {
                    expert: mlp(64, Activation::Silu, false),
                    ..plain
                },
            )
        },
        MixtureCase {
            has_pairs: true,
            ..case("ties of experts", plain)
        },
        case(
            "qwen2",
            ExpertsSpec {
                count: 19,
                chosen: 5,
                router: RouterSpec {
                    weights: normalized(0.0),
                    ..SOFTMAX
                },
                shared: shared(112, true),
                ..plain
            },
        ),
        case(
            "deepseek v3",
            ExpertsSpec {
                count: 16,
                chosen: 4,
                router: deepseek,
                shared: shared(32, false),
                ..plain
            },
        ),
        MixtureCase {
            has_pairs: true,
            ..case(
                "ties of groups",
                ExpertsSpec {
                    count: 16,
                    chosen: 2,
                    router: RouterSpec {
                        has_choice_bias: false,
                        groups: groups(4, 1, GroupScore::TwoBestSum),
                        ..deepseek
                    },
                    ..plain
                },
            )
        },
        case(
            "deepseek v2",
            ExpertsSpec {
                count: 12,
                chosen: 3,
                router: RouterSpec {
                    groups: groups(3, 2, GroupScore::Max),
                    scale: 16.0,
                    ..SOFTMAX
                },
                ..plain
            },
        ),
        case(
            "gpt-oss",
            ExpertsSpec {
                expert: mlp(48, Activation::ClampedSwiGlu { limit: 0.5 }, true),
                router: RouterSpec {
                    score: RouterScore::Identity,
                    has_bias: true,
                    weights: ChosenWeights::Softmax,
                    ..SOFTMAX
                },
                ..plain
            },
        ),
    ]
}

/// Weights of a case on the processor.
struct Loaded {
    router: CpuMatrix,
    choice_bias: Option<CpuVector>,
    experts: Vec<GatedMatrices<CpuMatrix>>,
    shared: Option<GatedMatrices<CpuMatrix>>,
}

impl MixtureCase {
    fn router(&self) -> Vec<f32> {
        let rows = self.spec.count + usize::from(self.has_gate());
        let mut router = numbers(31, rows * self.hidden);
        if self.has_pairs {
            let half = self.spec.count / 2 * self.hidden;
            router.copy_within(..half, half);
        }
        router
    }

    fn has_gate(&self) -> bool {
        self.spec.shared.is_some_and(|shared| shared.has_gate)
    }

    fn router_bias(&self) -> Option<Vec<f32>> {
        let bias = numbers(32, self.spec.count + usize::from(self.has_gate()));
        self.spec.router.has_bias.then_some(bias)
    }

    fn choice_bias(&self) -> Option<Vec<f32>> {
        let bias = numbers(33, self.spec.count);
        self.spec.router.has_choice_bias.then_some(bias)
    }

    /// Gate and up, and down of one expert, by a seed.
    fn matrices(
        &self,
        pack: &CpuWeightLoader,
        mlp: GatedMlpSpec,
        seed: u64,
    ) -> GatedMatrices<CpuMatrix> {
        let (hidden, width) = (self.hidden, mlp.width);
        let stored = |part: u64, rows: usize, columns: usize| -> [StoredMatrix; 1] {
            let seed = 10 * seed + part;
            let values = numbers(seed, rows * columns);
            let scaled: Vec<f32> = values.iter().map(|v| v / (columns as f32).sqrt()).collect();
            [StoredTensor::from_f32(&format!("w{seed}"), rows, columns, &scaled).into()]
        };
        let bias = |part: u64, rows: usize| mlp.bias.then(|| numbers(10 * seed + part, rows));
        let slices = InnerSlices::halved(width, 16, if width >= 128 { 4 } else { 2 });
        GatedMatrices {
            gate_up: pack
                .gate_up(&stored(0, 2 * width, hidden), bias(1, 2 * width).as_deref())
                .unwrap(),
            down: pack
                .sliced_matrix(
                    &stored(2, hidden, width),
                    bias(3, hidden).as_deref(),
                    &slices,
                )
                .unwrap(),
        }
    }

    fn load(&self, options: &CpuOptions) -> Loaded {
        let pack = CpuWeightLoader::new(options);
        let values = self.router();
        let rows = values.len() / self.hidden;
        let router = StoredTensor::from_f32("router", rows, self.hidden, &values);
        let choice_bias = self.choice_bias().map(|bias| pack.vector(&bias).unwrap());
        let experts = (0..self.spec.count as u64)
            .map(|expert| self.matrices(&pack, self.spec.expert, 100 + expert))
            .collect();
        let shared = self.spec.shared;
        Loaded {
            router: pack
                .exact_matrix(&[router.into()], self.router_bias().as_deref())
                .unwrap(),
            choice_bias,
            experts,
            shared: shared.map(|shared| self.matrices(&pack, shared.mlp, 99)),
        }
    }

    /// The mixture of these rows.
    fn run(&self, options: &CpuOptions, loaded: &Loaded, x: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.hidden;
        let mut ops = CpuOps::new(options).unwrap();
        let input = filled(&ops, rows, x);
        // Earlier contents of the result do not matter.
        let mut out = filled(&ops, rows, &vec![f32::NAN; x.len()]);
        let experts = Experts {
            spec: &self.spec,
            router: &loaded.router,
            choice_bias: loaded.choice_bias.as_ref(),
            experts: &loaded.experts,
            shared: loaded.shared.as_ref(),
        };
        ops.experts(&experts, rows, &input, &mut out).unwrap();
        out.values().to_vec()
    }

    /// Experts of a row and their weights, and the weight of the shared one, by the formula.
    fn route(&self, x: &[f32]) -> (Vec<(usize, f64)>, f64) {
        let RouterSpec {
            score,
            groups,
            weights,
            scale,
            ..
        } = self.spec.router;
        let count = self.spec.count;
        let bias = self.router_bias();
        let router = self.router();
        let logits: Vec<f64> = (router.chunks_exact(self.hidden).enumerate())
            .map(|(row, weights)| {
                let products = weights.iter().zip(x);
                let sum: f64 = products.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                sum + bias.as_ref().map_or(0.0, |bias| f64::from(bias[row]))
            })
            .collect();
        let exponentials = |logits: &[f64]| -> Vec<f64> {
            let powers: Vec<f64> = logits.iter().map(|logit| logit.exp()).collect();
            let sum: f64 = powers.iter().sum();
            powers.iter().map(|power| power / sum).collect()
        };
        let sigmoid = |logit: &f64| 1.0 / (1.0 + (-logit).exp());
        let scores = match score {
            RouterScore::Softmax => exponentials(&logits[..count]),
            RouterScore::Sigmoid => logits[..count].iter().map(sigmoid).collect(),
            RouterScore::Identity => logits[..count].to_vec(),
        };
        let choice = self.choice_bias().unwrap_or_else(|| vec![0.0; count]);
        let biased: Vec<f64> = (scores.iter().zip(choice))
            .map(|(score, bias)| score + f64::from(bias))
            .collect();
        let best = |scores: Vec<(usize, f64)>, chosen: usize| -> Vec<usize> {
            let mut scores = scores;
            // A stable sort keeps the lower index first.
            scores.sort_by(|a, b| b.1.total_cmp(&a.1));
            scores
                .iter()
                .take(chosen)
                .map(|(index, _)| *index)
                .collect()
        };
        let open: Vec<usize> = match groups {
            None => (0..count).collect(),
            Some(groups) => {
                let each = count / groups.count;
                let scores = biased.chunks_exact(each).map(|group| {
                    let mut sorted = group.to_vec();
                    sorted.sort_by(|a, b| b.total_cmp(a));
                    match groups.score {
                        GroupScore::Max => sorted[0],
                        GroupScore::TwoBestSum => sorted[0] + sorted[1],
                    }
                });
                let chosen = best(scores.enumerate().collect(), groups.chosen);
                (0..count)
                    .filter(|expert| chosen.contains(&(expert / each)))
                    .collect()
            }
        };
        let open = open.into_iter().map(|expert| (expert, biased[expert]));
        let mut chosen = best(open.collect(), self.spec.chosen);
        chosen.sort_unstable();
        let of_chosen: Vec<f64> = chosen.iter().map(|expert| scores[*expert]).collect();
        let of_chosen = match weights {
            ChosenWeights::Scores => of_chosen,
            ChosenWeights::Normalized { epsilon } => {
                let sum = of_chosen.iter().sum::<f64>() + f64::from(epsilon);
                of_chosen.iter().map(|score| score / sum).collect()
            }
            ChosenWeights::Softmax => exponentials(&of_chosen),
        };
        let scaled = of_chosen.iter().map(|weight| weight * f64::from(scale));
        let shared = if self.has_gate() {
            sigmoid(&logits[count])
        } else {
            1.0
        };
        (chosen.into_iter().zip(scaled).collect(), shared)
    }

    /// The mixture of one row, by the formula over the products of this row alone.
    fn expected(&self, options: &CpuOptions, loaded: &Loaded, x: &[f32]) -> Vec<f64> {
        let mut ops = CpuOps::new(options).unwrap();
        let mut output = |matrices: &GatedMatrices<CpuMatrix>, mlp: GatedMlpSpec| -> Vec<f32> {
            let input = filled(&ops, 1, x);
            let buffer = |width| ops.rows(1, width, BufferRole::Activations).unwrap();
            let (mut gate_up, mut gated) = (buffer(2 * mlp.width), buffer(mlp.width));
            let mut out = buffer(self.hidden);
            let to = GatedIo {
                activation: mlp.activation,
                gate_up: &mut gate_up,
                out: &mut gated,
            };
            ops.gated(&matrices.gate_up, 1, &input, to).unwrap();
            ops.matmul(&matrices.down, 1, &gated, &mut out).unwrap();
            out.values().to_vec()
        };
        let (chosen, shared_weight) = self.route(x);
        let mut outputs: Vec<(f64, Vec<f32>)> = chosen
            .iter()
            .map(|(expert, weight)| (*weight, output(&loaded.experts[*expert], self.spec.expert)))
            .collect();
        if let (Some(matrices), Some(shared)) = (&loaded.shared, self.spec.shared) {
            outputs.push((shared_weight, output(matrices, shared.mlp)));
        }
        let mut sum = vec![0.0; self.hidden];
        for (weight, output) in outputs {
            for (sum, value) in sum.iter_mut().zip(output) {
                *sum += weight * f64::from(value);
            }
        }
        sum
    }

    fn x(&self, rows: usize) -> Vec<f32> {
        numbers(7, rows * self.hidden)
    }
}

#[test]
fn a_mixture_follows_its_formula_on_every_isa() {
    for case in cases() {
        for isa in available() {
            for precision in [Precision::F32, Precision::Bf16] {
                let options = options(precision, isa, 2);
                let loaded = case.load(&options);
                let rows = if isa == Isa::Plain { 5 } else { 37 };
                let x = case.x(rows);
                let found = case.run(&options, &loaded, &x);
                let expected = x.chunks_exact(case.hidden);
                let expected: Vec<f64> = expected
                    .flat_map(|row| case.expected(&options, &loaded, row))
                    .collect();
                let label = format!("{} {isa} {precision:?}", case.name);
                assert_close(&found, &expected, 2e-5, &label);
            }
        }
    }
}

/// Options with every format of weights that is made when loading.
fn formats(isa: Isa, threads: usize) -> Vec<CpuOptions> {
    let of = |precision, quantize| CpuOptions {
        quantize,
        ..options(precision, isa, threads)
    };
    vec![
        of(Precision::F32, None),
        of(Precision::Bf16, None),
        of(Precision::Bf16, Some(Quantize::Int8)),
        of(Precision::Bf16, Some(Quantize::Int4)),
        of(Precision::Bf16, Some(Quantize::Mxfp4)),
        of(Precision::Bf16, Some(Quantize::Nvfp4)),
    ]
}

#[test]
fn a_row_has_the_same_bits_in_any_mixture() {
    for case in cases() {
        for isa in available().filter(|isa| *isa != Isa::Plain) {
            for options in formats(isa, 1) {
                let loaded = case.load(&options);
                let x = case.x(60);
                let together = case.run(&options, &loaded, &x);
                let label = format!("{} {isa} {:?}", case.name, options.quantize);
                for threads in [2, 5] {
                    let options = CpuOptions {
                        threads,
                        ..options.clone()
                    };
                    let again = case.run(&options, &loaded, &x);
                    assert!(same_bits(&together, &again), "{label} {threads} threads");
                }
                for rows in [0..1, 7..20, 59..60] {
                    let part = rows.start * case.hidden..rows.end * case.hidden;
                    let alone = case.run(&options, &loaded, &x[part.clone()]);
                    assert!(same_bits(&alone, &together[part]), "{label} {rows:?}");
                }
            }
        }
    }
}

/// Quantised experts beside a router that is not: the choice and the weights stay exact.
#[test]
fn a_router_is_never_quantised() {
    let isa = Isa::detect();
    for case in cases() {
        for options in formats(isa, 2) {
            let loaded = case.load(&options);
            let x = case.x(20);
            let found = case.run(&options, &loaded, &x);
            let expected = x.chunks_exact(case.hidden);
            let expected: Vec<f64> = expected
                .flat_map(|row| case.expected(&options, &loaded, row))
                .collect();
            let label = format!("{} {:?}", case.name, options.quantize);
            assert_close(&found, &expected, 2e-5, &label);
        }
    }
}

/// More outputs than wait for their sum at once.
#[test]
fn rows_of_several_pieces_have_the_bits_of_one() {
    let case = MixtureCase {
        name: "large",
        hidden: 512,
        spec: ExpertsSpec {
            count: 16,
            chosen: 8,
            expert: mlp(32, Activation::Silu, false),
            router: SOFTMAX,
            shared: Some(SharedExpertSpec {
                mlp: mlp(64, Activation::Silu, false),
                has_gate: true,
            }),
        },
        has_pairs: false,
    };
    let options = options(Precision::F32, Isa::detect(), 2);
    let loaded = case.load(&options);
    let x = case.x(2100);
    let together = case.run(&options, &loaded, &x);
    for row in [0, 1000, 2099] {
        let part = row * case.hidden..(row + 1) * case.hidden;
        let alone = case.run(&options, &loaded, &x[part.clone()]);
        assert!(same_bits(&alone, &together[part]), "row {row}");
    }
}

/// A row of NaN is computed, so that whoever reads its logits sees that they are none.
#[test]
fn rows_that_are_no_numbers_stay_so() {
    for case in cases() {
        let options = options(Precision::F32, Isa::detect(), 2);
        let loaded = case.load(&options);
        let mut x = case.x(3);
        x[case.hidden] = f32::NAN;
        let found = case.run(&options, &loaded, &x);
        let mut rows = found.chunks_exact(case.hidden);
        assert!(
            rows.next().unwrap().iter().all(|v| v.is_finite()),
            "{}",
            case.name
        );
        assert!(
            rows.next().unwrap().iter().all(|v| v.is_nan()),
            "{}",
            case.name
        );
        assert!(
            rows.next().unwrap().iter().all(|v| v.is_finite()),
            "{}",
            case.name
        );
    }
}
