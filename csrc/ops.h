// The ops of attention and append, as register.cpp binds them; arguments are as in the schemas of
// caramba_fast/ops/registry.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"

namespace caramba_fast {

// Both take any number of query tokens; register.cpp checks what each op allows.
std::tuple<Tensor, Tensor> cached_attention(
    bool prompt, const Tensor& q, const Tensor& k_codes, const MaybeTensor& k_scales,
    const Tensor& v_codes, const MaybeTensor& v_scales, const Tensor& cache_seqlens,
    const std::string& k_kind, const std::string& v_kind, std::int64_t n_kv_heads,
    const MaybeTensor& block_table, const MaybeTensor& cache_leftpad, const MaybeTensor& query_lens,
    std::int64_t residual_len, const MaybeTensor& k_tail, const MaybeTensor& k_sink, bool rotate_k,
    const MaybeTensor& v_tail, const MaybeTensor& v_sink, bool rotate_v, const MaybeTensor& null_k,
    const MaybeTensor& null_v, const MaybeTensor& s_aux, std::optional<double> softmax_scale,
    const std::vector<std::int64_t>& window_size, std::int64_t num_sink_tokens, double softcap,
    std::int64_t num_splits);

std::tuple<Tensor, Tensor> decoupled_cached_attention(
    bool prompt, const Tensor& q_sem, const Tensor& q_geo, const Tensor& k_sem_codes,
    const MaybeTensor& k_sem_scales, const Tensor& k_geo_codes, const MaybeTensor& k_geo_scales,
    const Tensor& v_codes, const MaybeTensor& v_scales, const Tensor& cache_seqlens,
    const std::string& k_sem_kind, const std::string& k_geo_kind, const std::string& v_kind,
    std::int64_t n_kv_heads, const MaybeTensor& block_table, const MaybeTensor& cache_leftpad,
    const MaybeTensor& query_lens, std::int64_t residual_len, const MaybeTensor& k_sem_tail,
    const MaybeTensor& k_sem_sink, bool rotate_k_sem, const MaybeTensor& k_geo_tail,
    const MaybeTensor& k_geo_sink, bool rotate_k_geo, const MaybeTensor& v_tail,
    const MaybeTensor& v_sink, bool rotate_v, const MaybeTensor& null_k_sem,
    const MaybeTensor& null_k_geo, const MaybeTensor& null_v, const MaybeTensor& s_aux,
    std::optional<double> sem_scale, std::optional<double> geo_scale,
    const std::vector<std::int64_t>& window_size, std::int64_t num_sink_tokens, double softcap,
    std::int64_t num_splits);

void append_(Tensor& k_codes, MaybeTensor k_scales, Tensor& v_codes, MaybeTensor v_scales,
             const Tensor& k_new, const Tensor& v_new, const Tensor& start,
             const std::string& k_kind, const std::string& v_kind, const MaybeTensor& block_table,
             const MaybeTensor& cache_leftpad, const MaybeTensor& query_lens,
             const MaybeTensor& k_tail, const MaybeTensor& k_sink, bool rotate_k,
             const std::string& fit_k, const MaybeTensor& k_query_rms, const MaybeTensor& v_tail,
             const MaybeTensor& v_sink, bool rotate_v, const std::string& fit_v,
             const MaybeTensor& v_query_rms, const MaybeTensor& rotary_q,
             const MaybeTensor& rotary_cos, const MaybeTensor& rotary_sin, MaybeTensor rotary_out);

void decoupled_append_(
    Tensor& k_sem_codes, MaybeTensor k_sem_scales, Tensor& k_geo_codes, MaybeTensor k_geo_scales,
    Tensor& v_codes, MaybeTensor v_scales, const Tensor& k_sem_new, const Tensor& k_geo_new,
    const Tensor& v_new, const Tensor& start, const std::string& k_sem_kind,
    const std::string& k_geo_kind, const std::string& v_kind, const MaybeTensor& block_table,
    const MaybeTensor& cache_leftpad, const MaybeTensor& query_lens, const MaybeTensor& k_sem_tail,
    const MaybeTensor& k_sem_sink, bool rotate_k_sem, const std::string& fit_k_sem,
    const MaybeTensor& k_sem_query_rms, const MaybeTensor& k_geo_tail,
    const MaybeTensor& k_geo_sink, bool rotate_k_geo, const std::string& fit_k_geo,
    const MaybeTensor& k_geo_query_rms, const MaybeTensor& v_tail, const MaybeTensor& v_sink,
    bool rotate_v, const std::string& fit_v, const MaybeTensor& v_query_rms,
    const MaybeTensor& rotary_q, const MaybeTensor& rotary_cos, const MaybeTensor& rotary_sin,
    MaybeTensor rotary_out);

// Repeat kept calls (planned.h) with other tensors of the same shapes and dtypes.
void append_planned(std::int64_t number, const Tensor& first, const Tensor& second,
                    const Tensor& start, const MaybeTensor& block_table,
                    const MaybeTensor& cache_leftpad, const MaybeTensor& query_lens,
                    const MaybeTensor& rotary_q, const MaybeTensor& rotary_cos,
                    const MaybeTensor& rotary_sin, MaybeTensor rotary_out,
                    const MaybeTensor& third);

std::tuple<Tensor, Tensor> attention_planned(std::int64_t number, const Tensor& q,
                                             const Tensor& cache_seqlens,
                                             const MaybeTensor& block_table,
                                             const MaybeTensor& cache_leftpad,
                                             const MaybeTensor& query_lens,
                                             const MaybeTensor& q_geo);

// Applies RoPE to x (B, H, T, D), contiguous, into `out`, or a new tensor if that is null.
Tensor turned(const Tensor& x, const char* name, const Tensor& cos, const Tensor& sin,
              Tensor* out = nullptr);

// Raises unless cos and sin are (B or 1, T, ...) of one shape and of the dtype of x.
void check_angles(const Tensor& x, const Tensor& cos, const Tensor& sin);

std::tuple<Tensor, Tensor> apply_rotary_emb(const Tensor& q, const Tensor& k, const Tensor& cos,
                                            const Tensor& sin);

std::tuple<Tensor, Tensor> merge_state(const Tensor& out_a, const Tensor& lse_a,
                                       const Tensor& out_b, const Tensor& lse_b);

}  // namespace caramba_fast
