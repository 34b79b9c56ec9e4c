//! Tests of mixtures of experts: against the CPU backend in f32, and rows alone against rows beside
//! others, so that every kernel is used.

use crate::operations::{BufferAccess, DeviceUnderTest, assert_near, cpu, cuda, numbers};
use cleave_checkpoint::{ByteCodes, QuantizedTensor, QuantizedType, StoredMatrix, StoredTensor};
use cleave_engine::ops::{
    Activation, BufferRole, ChosenWeights, ExpertGroups, Experts, ExpertsSpec, GatedMatrices,
    GatedMlpSpec, GroupScore, InnerSlices, KvType, Precision, Quantize, RouterScore, RouterSpec,
    SharedExpertSpec, WeightLoader,
};

/// A mixture with random weights.
#[derive(Clone, Copy)]
struct DeviceMixtureCase {
    name: &'static str,
    hidden: usize,
    spec: ExpertsSpec,
    /// Whether experts `i` and `i + count / 2` have the same row in the router, so that ties
    /// decide.
    has_pairs: bool,
    /// Codes of the experts' weights, and the columns that share a scale.
    codes: Option<(QuantizedType, usize)>,
    /// Format to which dense weights are rounded before they are loaded.
    rounds: Option<Quantize>,
}

const fn mlp(width: usize, activation: Activation, bias: bool) -> GatedMlpSpec {
    GatedMlpSpec {
        width,
        activation,
        bias,
    }
}

const SILU: GatedMlpSpec = mlp(64, Activation::Silu, false);

const SOFTMAX: RouterSpec = RouterSpec {
    score: RouterScore::Softmax,
    has_bias: false,
    has_choice_bias: false,
    groups: None,
    weights: ChosenWeights::Scores,
    scale: 1.0,
};

const PLAIN: ExpertsSpec = ExpertsSpec {
    count: 8,
    chosen: 3,
    expert: SILU,
    router: SOFTMAX,
    shared: None,
};

const fn case(name: &'static str, spec: ExpertsSpec) -> DeviceMixtureCase {
    DeviceMixtureCase {
        name,
        hidden: 96,
        spec,
        has_pairs: false,
        codes: None,
        rounds: None,
    }
}

const fn groups(count: usize, chosen: usize, score: GroupScore) -> Option<ExpertGroups> {
    Some(ExpertGroups {
        count,
        chosen,
        score,
    })
}

/// Routers of every kind, with biases, shared experts and widths that no tensor-core kernel takes.
fn cases() -> Vec<DeviceMixtureCase> {
    let deepseek = RouterSpec {
        score: RouterScore::Sigmoid,
        has_choice_bias: true,
        groups: groups(4, 2, GroupScore::TwoBestSum),
        weights: ChosenWeights::Normalized { epsilon: 1e-20 },
        scale: 2.5,
        ..SOFTMAX
    };
    let shared = |mlp, has_gate| Some(SharedExpertSpec { mlp, has_gate });
    let ties = ExpertsSpec {
        count: 16,
        chosen: 2,
        router: RouterSpec {
            has_choice_bias: false,
            groups: groups(4, 1, GroupScore::TwoBestSum),
            ..deepseek
        },
        ..PLAIN
    };
    let qwen2 = ExpertsSpec {
        count: 70,
        chosen: 5,
        router: RouterSpec {
            weights: ChosenWeights::Normalized { epsilon: 0.0 },
            ..SOFTMAX
        },
        shared: shared(mlp(112, Activation::Silu, false), true),
        ..PLAIN
    };
    let deepseek_v2 = ExpertsSpec {
        count: 12,
        router: RouterSpec {
            groups: groups(3, 2, GroupScore::Max),
            scale: 16.0,
            ..SOFTMAX
        },
        // Rows of no whole 16 bytes.
        expert: mlp(44, Activation::GeluTanh, false),
        ..PLAIN
    };
    let gpt_oss = ExpertsSpec {
        expert: mlp(160, Activation::ClampedSwiGlu { limit: 0.5 }, true),
        router: RouterSpec {
            score: RouterScore::Identity,
            has_bias: true,
            weights: ChosenWeights::Softmax,
            ..SOFTMAX
        },
        ..PLAIN
    };
    let deepseek_v3 = ExpertsSpec {
        count: 16,
        chosen: 4,
        router: deepseek,
        shared: shared(mlp(32, Activation::Silu, false), false),
        ..PLAIN
    };
    vec![
        case("olmoe", PLAIN),
        DeviceMixtureCase {
            has_pairs: true,
            ..case("ties of experts", PLAIN)
        },
        DeviceMixtureCase {
            has_pairs: true,
            ..case("ties of groups", ties)
        },
        case("qwen2", qwen2),
        case("deepseek v2", deepseek_v2),
        case("deepseek v3", deepseek_v3),
        case("gpt-oss", gpt_oss),
    ]
}

/// Weights of a case on a device.
struct LoadedMixture<P: WeightLoader> {
    router: P::Matrix,
    choice_bias: Option<P::Vector>,
    experts: Vec<GatedMatrices<P::Matrix>>,
    shared: Option<GatedMatrices<P::Matrix>>,
}

impl DeviceMixtureCase {
    fn has_gate(&self) -> bool {
        self.spec.shared.is_some_and(|shared| shared.has_gate)
    }

    fn stored(&self, seed: u64, rows: usize, columns: usize, is_dense: bool) -> StoredMatrix {
        let name = format!("w{seed}");
        let values = numbers(seed, rows * columns);
        let Some((element, group)) = self.codes.filter(|_| !is_dense) else {
            // A power of two keeps the numbers exact in bf16.
            let scale = ((columns as f32).log2() / 2.0).round().exp2();
            let scaled: Vec<f32> = values.iter().map(|value| value / scale).collect();
            return StoredTensor::from_f32(&name, rows, columns, &scaled).into();
        };
        let group = group.min(columns);
        let code = |x: &f32| match (element, ((x * 120.0) as i8).cast_unsigned()) {
            // One of the two NaN codes.
            (QuantizedType::E4m3, 0xff) => 0xfe,
            (QuantizedType::E4m3 | QuantizedType::Int8, code) => code,
            (QuantizedType::Int4 | QuantizedType::E2m1, _) => ((x + 1.0) * 7.9) as u8,
        };
        let codes: Vec<u8> = values.iter().map(code).collect();
        let unit = match element {
            QuantizedType::Int8 => 1024.0,
            QuantizedType::E4m3 => 256.0,
            QuantizedType::Int4 | QuantizedType::E2m1 => 32.0,
        };
        let scales: Vec<f32> = numbers(seed + 1, rows * columns.div_ceil(group))
            .iter()
            .map(|x| half::f16::from_f32((0.5 + x.abs()) / unit).to_f32())
            .collect();
        let zero_max = u8::from(element == QuantizedType::Int4) * 15;
        let zeros = numbers(seed + 2, scales.len());
        let zeros: Vec<u8> = zeros
            .iter()
            .map(|x| (x.abs() * 15.9) as u8 & zero_max)
            .collect();
        let coded = ByteCodes {
            element,
            codes: &codes,
            group,
            scales: &scales,
            zeros: &zeros,
        };
        QuantizedTensor::from_codes(&name, rows, columns, &coded).into()
    }

    fn matrices<P: WeightLoader>(
        &self,
        pack: &P,
        mlp: GatedMlpSpec,
        seed: u64,
        is_dense: bool,
    ) -> GatedMatrices<P::Matrix> {
        let (hidden, width) = (self.hidden, mlp.width);
        let bias = |part: u64, rows: usize| mlp.bias.then(|| numbers(10 * seed + part, rows));
        let gate_up = self.stored(10 * seed, 2 * width, hidden, is_dense);
        let down = self.stored(10 * seed + 5, hidden, width, is_dense);
        let slices = match width {
            _ if !width.is_multiple_of(32) => InnerSlices::whole(width),
            32 => InnerSlices::halved(width, 16, 2),
            _ => InnerSlices::halved(width, 32, if width >= 128 { 4 } else { 2 }),
        };
        let rounded = |dense: StoredMatrix, slices: &InnerSlices| match self.rounds {
            Some(quantize) => dense.rounded(quantize.form(slices), 2).into(),
            None => dense,
        };
        let gate_up = [rounded(gate_up, &InnerSlices::whole(hidden))];
        let down = [rounded(down, &slices)];
        GatedMatrices {
            gate_up: pack
                .gate_up(&gate_up, bias(1, 2 * width).as_deref())
                .unwrap(),
            down: pack
                .sliced_matrix(&down, bias(2, hidden).as_deref(), &slices)
                .unwrap(),
        }
    }

    fn load<P: WeightLoader>(&self, pack: &P) -> LoadedMixture<P> {
        let columns = self.spec.count + usize::from(self.has_gate());
        let mut values = numbers(31, columns * self.hidden);
        if self.has_pairs {
            let half = self.spec.count / 2 * self.hidden;
            values.copy_within(..half, half);
        }
        let router = StoredTensor::from_f32("router", columns, self.hidden, &values);
        let bias = self.spec.router.has_bias.then(|| numbers(32, columns));
        let choice_bias = (self.spec.router.has_choice_bias).then(|| numbers(33, self.spec.count));
        let router = pack
            .exact_matrix(&[router.into()], bias.as_deref())
            .unwrap();
        let choice_bias = choice_bias.map(|bias| pack.vector(&bias).unwrap());
        let experts: Vec<_> = (0..self.spec.count as u64)
            .map(|expert| self.matrices(pack, self.spec.expert, 100 + expert, false))
            .collect();
        pack.check_experts(&experts).unwrap();
        let shared = self.spec.shared;
        let shared = shared.map(|shared| self.matrices(pack, shared.mlp, 99, true));
        pack.finish().unwrap();
        LoadedMixture {
            router,
            choice_bias,
            experts,
            shared,
        }
    }

    /// The mixture of these rows.
    fn run<O: BufferAccess>(
        &self,
        on: &mut DeviceUnderTest<O>,
        loaded: &LoadedMixture<O::Pack>,
        x: &[f32],
    ) -> Vec<f32> {
        let rows = x.len() / self.hidden;
        let input = on.rows(x, self.hidden, BufferRole::Activations);
        let before = vec![7.0; x.len()];
        let mut out = on.rows(&before, self.hidden, BufferRole::Activations);
        let experts = Experts {
            spec: &self.spec,
            router: &loaded.router,
            choice_bias: loaded.choice_bias.as_ref(),
            experts: &loaded.experts,
            shared: loaded.shared.as_ref(),
        };
        on.begin_rows(rows);
        on.ops.experts(&experts, rows, &input, &mut out).unwrap();
        on.ops.get_rows(&out)
    }

    fn x(&self, rows: usize) -> Vec<f32> {
        numbers(7, rows * self.hidden)
    }
}

/// Few rows and many of each expert.
#[test]
fn mixtures_of_experts_match_the_cpu() {
    for precision in [Precision::F32, Precision::Bf16] {
        for case in cases() {
            let Some(mut gpu) = cuda(precision, precision.into()) else {
                return;
            };
            let mut cpu = cpu(KvType::F32);
            let (on_gpu, on_cpu) = (case.load(&gpu.pack), case.load(&cpu.pack));
            for rows in [1, 70] {
                let x = case.x(rows);
                let got = case.run(&mut gpu, &on_gpu, &x);
                let want = case.run(&mut cpu, &on_cpu, &x);
                let tolerance = match precision {
                    Precision::F32 => 1e-5,
                    // Gated products are rounded, and results.
                    Precision::Bf16 => 1e-2,
                };
                let label = format!("{}, {} rows, {}", case.name, rows, precision.name());
                assert_near(&label, tolerance, &got, &want);
            }
        }
    }
}

/// The numbers of rows choose tiles of 8, 16, 32, 64 and 128; 37 has a bit of a second word.
#[test]
fn a_row_has_the_same_bits_beside_any_other_rows() {
    let Some(mut gpu) = cuda(Precision::Bf16, KvType::Bf16) else {
        return;
    };
    let case = DeviceMixtureCase {
        hidden: 288,
        ..case("all tiles", PLAIN)
    };
    let loaded = case.load(&gpu.pack);
    let x = case.x(230);
    let all = case.run(&mut gpu, &loaded, &x);
    for rows in [1, 13, 25, 37, 100] {
        let some = case.run(&mut gpu, &loaded, &x[..rows * case.hidden]);
        assert!(same_bits(&some, &all[..some.len()]), "{rows} rows");
    }
    let last = case.run(&mut gpu, &loaded, &x[229 * case.hidden..]);
    assert!(same_bits(&last, &all[229 * case.hidden..]), "the last row");
}

fn same_bits(left: &[f32], right: &[f32]) -> bool {
    let bits = |values: &[f32]| {
        values
            .iter()
            .map(|value| value.to_bits())
            .collect::<Vec<u32>>()
    };
    bits(left) == bits(right)
}

/// A row of NaN takes some experts, gives NaN, and leaves other rows alone.
#[test]
fn rows_that_are_no_numbers_stay_alone() {
    let Some(mut gpu) = cuda(Precision::Bf16, KvType::Bf16) else {
        return;
    };
    for case in cases() {
        let loaded = case.load(&gpu.pack);
        let mut x = case.x(3);
        let want = case.run(&mut gpu, &loaded, &x);
        x[case.hidden] = f32::NAN;
        let found = case.run(&mut gpu, &loaded, &x);
        let rows = found
            .chunks_exact(case.hidden)
            .zip(want.chunks_exact(case.hidden));
        for (row, (found, want)) in rows.enumerate() {
            let is_right = match row {
                1 => found.iter().all(|value| value.is_nan()),
                _ => same_bits(found, want),
            };
            assert!(is_right, "{}, row {row}", case.name);
        }
    }
}

/// Each format, for few rows and for many: as the CPU in f32, and a row alone as beside others.
#[test]
fn quantised_experts_match_the_cpu_and_themselves() {
    use QuantizedType::{E2m1, E4m3, Int4, Int8};
    let whole = 1 << 20;
    for codes in [
        (E4m3, whole),
        (E4m3, 32),
        (Int8, whole),
        (Int4, 32),
        (E2m1, 32),
        (E2m1, 16),
    ] {
        let Some(mut gpu) = cuda(Precision::Bf16, KvType::Bf16) else {
            return;
        };
        let mut cpu = cpu(KvType::F32);
        let case = DeviceMixtureCase {
            codes: Some(codes),
            ..case("quantised", PLAIN)
        };
        let (on_gpu, on_cpu) = (case.load(&gpu.pack), case.load(&cpu.pack));
        assert!(
            on_gpu
                .experts
                .iter()
                .all(|of| of.gate_up.is_quantized() && of.down.is_quantized())
        );
        let x = case.x(70);
        let all = case.run(&mut gpu, &on_gpu, &x);
        let want = case.run(&mut cpu, &on_cpu, &x);
        assert_near(&format!("{codes:?}"), 1e-2, &all, &want);
        for rows in [1, 13, 25, 37] {
            let some = case.run(&mut gpu, &on_gpu, &x[..rows * case.hidden]);
            assert!(
                same_bits(&some, &all[..some.len()]),
                "{codes:?}, {rows} rows"
            );
        }
    }
}

/// Each format that a GPU takes: experts that are rounded when they are loaded have the bits of
/// those that were rounded before.
#[test]
fn experts_rounded_at_load_equal_experts_that_were_rounded() {
    for quantize in Quantize::ALL {
        let Some(mut gpu) = cuda(Precision::Bf16, KvType::Bf16) else {
            return;
        };
        let Some(mut again) = cuda(Precision::Bf16, KvType::Bf16) else {
            return;
        };
        again.pack = again.pack.with_quantize(Some(quantize));
        let case = case("rounded", PLAIN);
        let rounded = DeviceMixtureCase {
            rounds: Some(quantize),
            ..case
        };
        let (before, at_load) = (rounded.load(&gpu.pack), case.load(&again.pack));
        assert!(
            at_load
                .experts
                .iter()
                .all(|of| of.gate_up.is_quantized() && of.down.is_quantized())
        );
        let x = case.x(25);
        let expected = rounded.run(&mut gpu, &before, &x);
        let found = case.run(&mut again, &at_load, &x);
        assert!(same_bits(&found, &expected), "{}", quantize.name());
        let mut cpu = cpu(KvType::F32);
        let on_cpu = rounded.load(&cpu.pack);
        let want = rounded.run(&mut cpu, &on_cpu, &x);
        assert_near(quantize.name(), 1e-2, &found, &want);
    }
}

/// Experts of one layer are computed together, so that they have one format.
#[test]
fn experts_of_different_formats_are_refused_when_loaded() {
    let Some(gpu) = cuda(Precision::Bf16, KvType::Bf16) else {
        return;
    };
    let quantised = DeviceMixtureCase {
        codes: Some((QuantizedType::Int4, 32)),
        ..case("mixed", PLAIN)
    };
    let experts: Vec<_> = (0..3)
        .map(|expert| quantised.matrices(&gpu.pack, SILU, expert, expert == 2))
        .collect();
    let error = gpu.pack.check_experts(&experts).unwrap_err().to_string();
    assert!(error.contains("expert 2"), "{error}");
}
