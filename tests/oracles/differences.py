"""Scenarios whose result differs from torch's on purpose. The tests assert both results.

When a test reports that a difference no longer exists, remove its entry. A new entry needs a reason that
holds for programs written for torch; fix a difference that has none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """The two results of a scenario, as their ``repr`` shows them, and why they differ."""

    torch: str
    here: str
    reason: str


OWN_TYPE = "an exception of user code keeps its type; futures of torch raise most of them as RuntimeErrors"
BY_VALUE = "functions that cannot be imported are sent by value"
TORCH_OPTIM = (
    "the owner makes the optimizer of torch.optim, which checks its arguments; torch makes a TorchScript copy"
)

DIFFERENCES: dict[str, dict[str, Difference]] = {
    "calls": {
        "a_single_tensor_as_args": Difference(
            "('Tensor', 'torch.float32', (), (), 'torch.strided', 'constant', 1.0)",
            "raises PayloadError",
            "a tensor is not a tuple of arguments: unpacking it into its rows hides a mistake",
        ),
        "an_operator_that_returns_several_tensors": Difference(
            "'class list'", "'class tuple'", "operators return what they return when they are called locally"
        ),
        "a_lambda": Difference("raises AttributeError", "5", BY_VALUE),
        "a_lambda_as_argument": Difference("raises AttributeError", "5", BY_VALUE),
        "a_local_function": Difference("raises AttributeError", "2", BY_VALUE),
        "strides_of_a_column": Difference(
            "((2,), (3,), 1, False, True)",
            "((2,), (3,), 0, False, True)",
            "only the part of the storage that a view covers is sent",
        ),
        "types_of_other_exceptions": Difference(
            "(raises RuntimeError, raises RuntimeError, raises RuntimeError, raises RuntimeError, "
            "raises RuntimeError, raises RuntimeError)",
            "(raises KeyError, raises AssertionError, raises StopIteration, raises OSError, "
            "raises AttributeError, raises CustomError)",
            OWN_TYPE,
        ),
        "an_exception_that_cannot_be_made_from_a_text": Difference(
            "raises RuntimeError", "raises PairError", "exceptions are rebuilt with all their arguments"
        ),
        "the_text_of_an_exception_with_two_arguments": Difference(
            "raises ValueError",
            "raises ValueError without 'On WorkerInfo'",
            "the arguments are unchanged; the remote traceback is in the cause",
        ),
        "a_negative_default_timeout": Difference(
            "None", "raises OptionError", "with torch each later call times out at once"
        ),
        "a_timeout_that_is_a_bool": Difference(
            "11", "raises ArgumentTypeError", "a bool is not a number of seconds"
        ),
        "the_class_of_futures": Difference(
            "False",
            "True",
            "torch documents a torch.futures.Future, and returns an instance of its base class",
        ),
        "an_exception_set_by_hand": Difference(
            "(raises AttributeError, 11)",
            "(raises RuntimeError, 11)",
            "follows from the class of futures; the result is set already",
        ),
        "an_asynchronous_function_whose_call_fails": Difference(
            "raises RuntimeError", "raises ValueError", OWN_TYPE
        ),
        "a_future_that_is_set_to_an_exception": Difference(
            "'<ValueError>'",
            "raises ValueError",
            "torch returns the exception as a value, so that the failure goes unnoticed",
        ),
        "an_rref_after_shutdown": Difference(
            "'<RRef>'",
            "raises NotInitializedError",
            "a reference without a worker cannot be used; before init_rpc both raise",
        ),
    },
    "rrefs": {
        "a_list_here": Difference(
            "False",
            "True",
            "the owner keeps the object itself; torch copies values that TorchScript has types for",
        ),
        "a_type_hint": Difference(
            "raises RuntimeError", "1", "the documented argument is accepted for all values"
        ),
        "data_by_proxy": Difference(
            "raises AttributeError",
            "raises TypeError",
            "methods are looked up on the value when they are called; torch looks at its class first",
        ),
    },
    "gradients": {
        "the_result_of_a_call_under_no_grad": Difference(
            "True", "False", "no_grad applies to the call: what it returns is a constant"
        ),
        "an_unused_result": Difference(
            "raises RuntimeError", "None", "a result that the loss does not use does not delay the pass"
        ),
        "a_context_after_shutdown": Difference(
            "None",
            "raises NotInitializedError",
            "a context without a worker records nothing; before init_rpc both raise",
        ),
    },
    "optimizers": {
        "a_negative_learning_rate": Difference("'<DistributedOptimizer>'", "raises ValueError", TORCH_OPTIM),
        "the_default_learning_rate_of_adamax": Difference(
            "('list', ('list', 0.997, 1.997), ('list', 2.997, 3.997))",
            "('list', ('list', 0.994, 1.994), ('list', 2.99401, 3.994))",
            TORCH_OPTIM,
        ),
        "a_value_that_is_no_parameter": Difference("raises RuntimeError", "raises TypeError", TORCH_OPTIM),
        "a_parameter_that_is_no_rref": Difference(
            "raises AttributeError",
            "raises ConfigurationError",
            "the arguments are checked, and the error names the element",
        ),
        "no_parameters": Difference("'<DistributedOptimizer>'", "raises ConfigurationError", TORCH_OPTIM),
    },
}
"""By family and scenario."""
