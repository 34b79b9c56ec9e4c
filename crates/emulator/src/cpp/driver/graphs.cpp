// Graphs: captured work that is launched as one, with replaceable parameters.
//
// Owns: graphs, their executable copies, and updates of those.
// Never: runs a node before all its dependencies.
// Invariant: a launch is fixed when it is called; an update is for later launches.
#include "functions.h"

namespace standin {
namespace {

std::shared_ptr<const Recipe> recipe_of(const Graph& graph) {
    std::map<const Node*, size_t> places;
    auto made = std::make_shared<Recipe>();
    for (auto& node : graph.nodes) {
        Step step = {node->id, node->work, {}};
        for (const Node* before : node->after) step.after.push_back(places.at(before));
        places[node.get()] = made->size();
        made->push_back(std::move(step));
    }
    return made;
}

LaunchShape shape_of(const CUDA_KERNEL_NODE_PARAMS& the) {
    return {{the.gridDimX, the.gridDimY, the.gridDimZ}, {the.blockDimX, the.blockDimY, the.blockDimZ}, the.sharedMemBytes};
}

const Function* function_of(const WorkPointer& work) {
    auto* kernel = dynamic_cast<const KernelWork*>(work.get());
    return kernel == nullptr ? nullptr : kernel->function;
}

enum : int { UPDATE_SUCCESS = 0, UPDATE_TOPOLOGY = 2, UPDATE_TYPE = 3, UPDATE_FUNCTION = 4 };

// Compares the shape of a graph with its replacement; `at` is the first step that differs.
int compare(const Recipe& old, const Recipe& fresh, size_t* at) {
    *at = 0;
    if (old.size() != fresh.size()) return UPDATE_TOPOLOGY;
    for (size_t index = 0; index < old.size(); index++) {
        *at = index;
        if (old[index].after != fresh[index].after) return UPDATE_TOPOLOGY;
        if (old[index].work->type() != fresh[index].work->type()) return UPDATE_TYPE;
        if (function_of(old[index].work) != function_of(fresh[index].work)) return UPDATE_FUNCTION;
    }
    return UPDATE_SUCCESS;
}

CUresult instantiate(CUgraphExec* made, CUgraph graph) {
    ENTER(call, During::Anything);
    if (made == nullptr || !is_live(graph)) return CUDA_ERROR_INVALID_VALUE;
    count("graph_made");
    *made = new GraphExec;
    (*made)->recipe = recipe_of(*graph);
    state().handles.insert(*made);
    return CUDA_SUCCESS;
}

CUresult get_nodes(CUgraph graph, CUgraphNode* nodes, size_t* count_of, bool (*is_wanted)(const Node&)) {
    ENTER(call, During::Anything);
    if (!is_live(graph) || count_of == nullptr) return CUDA_ERROR_INVALID_VALUE;
    size_t found = 0;
    for (auto& node : graph->nodes) {
        if (!is_wanted(*node)) continue;
        if (nodes != nullptr && found < *count_of) nodes[found] = node.get();
        found++;
    }
    *count_of = nodes == nullptr || found < *count_of ? found : *count_of;
    return CUDA_SUCCESS;
}

}  // namespace
}  // namespace standin

using namespace standin;

API cuGraphInstantiateWithFlags(CUgraphExec* made, CUgraph graph, unsigned long long) { return instantiate(made, graph); }

API cuGraphInstantiateWithParams(CUgraphExec* made, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
    CUresult result = instantiate(made, graph);
    if (params != nullptr) params->result_out = result == CUDA_SUCCESS ? 0 : 1;
    return result;
}

API cuGraphDestroy(CUgraph graph) {
    ENTER(call, During::Anything);
    if (!is_live(graph)) return CUDA_ERROR_INVALID_VALUE;
    for (auto& node : graph->nodes) state().handles.erase(node.get());
    state().handles.erase(graph);
    delete graph;
    return CUDA_SUCCESS;
}

// Launched work continues: it holds its own reference to the steps.
API cuGraphExecDestroy(CUgraphExec exec) {
    ENTER(call, During::Anything);
    if (!is_live(exec)) return CUDA_ERROR_INVALID_VALUE;
    state().handles.erase(exec);
    delete exec;
    return CUDA_SUCCESS;
}

API cuGraphUpload(CUgraphExec exec, CUstream handle) {
    ENTER(call, During::Anything);
    if (!is_live(exec)) return CUDA_ERROR_INVALID_VALUE;
    return find_stream(*call.context, handle) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

API cuGraphLaunch(CUgraphExec exec, CUstream handle) {
    ENTER(call, During::Anything);
    if (!is_live(exec)) return CUDA_ERROR_INVALID_VALUE;
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) {
        say("stand-in: graphs within graphs are not supported");
        stream->capture->is_broken = true;
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    count("graph_launch");
    auto run = std::make_shared<GraphRun>();
    run->recipe = exec->recipe;
    run->is_done.assign(exec->recipe->size(), false);
    run->left = exec->recipe->size();
    run->turns = exec->turns;
    run->turn = exec->turns->given++;
    Entry entry;
    entry.number = ++state().numbers;
    entry.graph = std::move(run);
    stream->queue.push_back(std::move(entry));
    return CUDA_SUCCESS;
}

API cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
    ENTER(call, During::Anything);
    if (!is_live(exec) || !is_live(graph)) return CUDA_ERROR_INVALID_VALUE;
    auto fresh = recipe_of(*graph);
    size_t at = 0;
    int result = compare(*exec->recipe, *fresh, &at);
    if (info != nullptr) *info = {result, result == UPDATE_SUCCESS || at >= graph->nodes.size() ? nullptr : graph->nodes[at].get(), nullptr};
    if (result != UPDATE_SUCCESS) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    // The nodes keep the handles of the graph that the executable was made from.
    auto renamed = std::make_shared<Recipe>(*fresh);
    for (size_t index = 0; index < renamed->size(); index++) (*renamed)[index].node = (*exec->recipe)[index].node;
    exec->recipe = std::move(renamed);
    return CUDA_SUCCESS;
}

API cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* params) {
    ENTER(call, During::Anything);
    if (!is_live(exec) || !is_live(node) || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto changed = std::make_shared<Recipe>(*exec->recipe);
    for (Step& step : *changed) {
        if (step.node != node->id) continue;
        if (function_of(step.work) == nullptr || function_of(step.work) != params->func) return CUDA_ERROR_INVALID_VALUE;
        std::shared_ptr<KernelWork> made;
        CUresult result = make_launch(params->func, shape_of(*params), params->kernelParams, &made);
        if (result != CUDA_SUCCESS) return result;
        step.work = std::move(made);
        exec->recipe = std::move(changed);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

API cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count_of) {
    return get_nodes(graph, nodes, count_of, [](const Node&) { return true; });
}

API cuGraphGetRootNodes(CUgraph graph, CUgraphNode* nodes, size_t* count_of) {
    return get_nodes(graph, nodes, count_of, [](const Node& node) { return node.after.empty(); });
}

API cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
    ENTER(call, During::Anything);
    if (!is_live(node)) return CUDA_ERROR_INVALID_VALUE;
    *type = node->work->type();
    return CUDA_SUCCESS;
}

API cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* params) {
    ENTER(call, During::Anything);
    if (!is_live(node) || params == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto* kernel = dynamic_cast<const KernelWork*>(node->work.get());
    if (kernel == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const LaunchShape& shape = kernel->shape;
    node->args_shown = kernel->args;
    node->args_pointer = node->args_shown.data();
    *params = {kernel->function, shape.grid.x, shape.grid.y, shape.grid.z, shape.block.x, shape.block.y, shape.block.z, shape.shared_bytes,
               &node->args_pointer, nullptr, nullptr, call.context};
    return CUDA_SUCCESS;
}

API cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* params) {
    ENTER(call, During::Anything);
    if (!is_live(node) || params == nullptr || function_of(node->work) == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<KernelWork> made;
    CUresult result = make_launch(params->func, shape_of(*params), params->kernelParams, &made);
    if (result == CUDA_SUCCESS) node->work = std::move(made);
    return result;
}
